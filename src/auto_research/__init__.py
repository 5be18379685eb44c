"""auto-research: papers made runnable, proven on the accelerator they claim, improved by controlled experiments."""

__version__ = "0.1.0"
