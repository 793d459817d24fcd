"""Which dataclasses of a folder may be changed once they are made: messages between parts may not."""

import pkgutil
from dataclasses import is_dataclass
from importlib import import_module


def changeable(folder):
    package = import_module(folder)
    modules = [import_module(result.name) for result in pkgutil.walk_packages(package.__path__, f"{folder}.")]
    classes = {item for module in modules for item in vars(module).values() if isinstance(item, type)}
    current = [item for item in classes if is_dataclass(item) and item.__module__.startswith(folder)]
    assert current
    return {item.__name__ for item in current if not item.__dataclass_params__.frozen}
