"""Grammars: what an answer may be, and which ids may follow at every position of it."""
