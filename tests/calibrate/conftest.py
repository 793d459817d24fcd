"""The small models that ladders are calibrated with."""

from tests.ladder.conftest import looped, tokenizer

__all__ = ["looped", "tokenizer"]
