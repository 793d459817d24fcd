"""K/V in few bits: what they cost in agreement, and what they save."""
