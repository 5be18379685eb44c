"""Runnable machine-learning papers, with evidence of what really ran."""

__version__ = "0.1.0"
