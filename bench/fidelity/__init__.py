"""Compute saved against fidelity: the whole trade-off of a checkpoint."""
