"""Verification that rises with evidence: effort policies and the loop of answering and verifying."""
