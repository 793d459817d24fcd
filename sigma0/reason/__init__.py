"""Outer loops: effort that rises with evidence, an agent that escalates when it is stuck, lemmas gated by code."""
