"""The two names of a cache: `past_key_values`, which transformers calls `cache` from 5.24 on.

Callers may use either with every supported release. Nothing else in the package asks which one transformers uses.
"""

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from operator import attrgetter
from typing import Any, TypeVar

from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

CACHE_NAMES = ("past_key_values", "cache")
# transformers' outputs, `generate` and masks use the same name
CACHE_NAME = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in CACHE_NAMES)

C = TypeVar("C")


def given_cache(past_key_values: C | None, cache: C | None) -> C | None:
    """The cache that a caller passed under one of its names; None for none.

    Raises:
        TypeError: If both are given.
    """
    if past_key_values is not None and cache is not None:
        raise TypeError("past_key_values and cache are two names of one argument: pass one of them")
    return cache if past_key_values is None else past_key_values


def named_cache(cache: Any) -> dict[str, Any]:
    """A cache as the keyword argument that transformers takes."""
    return {CACHE_NAME: cache}


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name under which a forward takes a cache; models from elsewhere need not follow transformers."""
    known = signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in known), CACHE_NAME)


class CacheNamesMixin(ModelOutput):  # type: ignore[misc]
    """An output whose cache can be read and set under both names, as attribute and as item."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_own(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_own(key), value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(_own(name), value)

    def __contains__(self, key: object) -> bool:
        return bool(super().__contains__(_own(key)))

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dictionary's."""
        return super().get(_own(key), default)


def _own(key: Any) -> Any:
    """The key under which an output holds what it is asked for."""
    return CACHE_NAME if isinstance(key, str) and key in CACHE_NAMES else key


# what is a field can be no property
[_other_name] = set(CACHE_NAMES) - {CACHE_NAME}
setattr(CacheNamesMixin, _other_name, property(attrgetter(CACHE_NAME)))
