"""Decode time of adaptive depth against full depth, and against transformers' own decoding."""
