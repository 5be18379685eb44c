"""A museum of GPU faults: small programs that a card refuses, each beside the program that works."""

from . import access, devices, numerics, process
from .exhibit import EXHIBITS, Exhibit

__all__ = ["EXHIBITS", "Exhibit", "access", "devices", "numerics", "process"]
