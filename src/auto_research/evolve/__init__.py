"""Controlled multi-round experiments: typed search spaces, fair ablations, paired promotion, a sealed test set."""
