"""Which dataclasses of a folder may be changed once they are made: messages between parts may not."""

import pkgutil
from dataclasses import is_dataclass
from importlib import import_module


def changeable(folder):
    """Names of the dataclasses of a package that are not frozen."""
    package = import_module(folder)
    modules = [import_module(found.name) for found in pkgutil.walk_packages(package.__path__, f"{folder}.")]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    own = [each for each in classes if is_dataclass(each) and each.__module__.startswith(folder)]
    assert own
    return {each.__name__ for each in own if not each.__dataclass_params__.frozen}
