"""The ground floor: devices, evidence, budgets, isolated processes and records.

It imports nothing else of this package. Import the modules, not this package: most of them stay free of
torch so that the command line answers at once.
"""
