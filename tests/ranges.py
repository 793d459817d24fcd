"""Fields that take values of a range alone."""

import pytest


def check_range(kind, name, good, bad, error=ValueError, **others):
    """A field keeps its good values, and the bad ones are refused by its name; the others are what `kind` needs."""
    for value in good:
        assert getattr(kind(**{**others, name: value}), name) == value
    for value in bad:
        with pytest.raises(error, match=name):
            kind(**{**others, name: value})
