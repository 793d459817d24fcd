"""Packages that import the module of a public name when the name is first used (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose names come from modules that are not imported yet.

    Args:
        package: Its `__name__`.
        modules: Which module to import for each name: the one that defines it, or that loads the submodule so named.

    Returns:
        The two functions, to be assigned in the package's `__init__.py`.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        namespace = vars(sys.modules[package])
        # a submodule is there already: importing it, or one that needs it, has put it there
        if name not in namespace:
            namespace[name] = getattr(module, name)
        return namespace[name]

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
