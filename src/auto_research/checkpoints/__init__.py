"""Language and vision checkpoints: where they come from, how they load, and their text vectors.

Import the modules, not this package: ``resolve`` answers without torch.
"""
