"""Whether the claims of a text are anchored in its context."""
