"""Sizes that a memory is computed from; torch, which takes a second to import, is not needed for that."""

# Planes of a layer of a coda: of what was read at the exit, and of what was read at loop T.
CODA_PLANES = 2
# Rows that the head reads at once of tokens that run no further, and up to which their states wait for it.
DEEPEST_ROWS = 64
