"""Readers of public data sets, their catalogue, and their splits."""
