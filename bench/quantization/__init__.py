"""Quantised weights beside floats: bytes, time and fidelity."""
