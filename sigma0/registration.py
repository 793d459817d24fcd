"""Registers the looped families with transformers' Auto classes, as soon as both packages are loaded.

`import sigma0` does not import transformers. So that `AutoModelForCausalLM.from_pretrained` knows the model type `ouro`
after `import sigma0`, in whichever order the two are imported, a finder on `sys.meta_path` observes the imports of both
packages; it locates no module itself. When the outermost such import has run and transformers' table of configurations
is loaded, it imports `sigma0.models.auto`, which registers the classes, and removes itself. Not earlier: while a module
of either package is still running, it could not import what that module is about to define.
"""

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
MODELS = "sigma0.models.auto"
PACKAGES = ("transformers", "sigma0")


def register_when_loaded() -> None:
    """Registers now if transformers' Auto classes are loaded, else as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        import_module(MODELS)
    else:
        sys.meta_path.insert(0, _ImportObserver())


def leave_out() -> None:
    """For a process that uses no Auto class: no family is imported but the one of its model."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ImportObserver)]


class _ImportObserver:
    """Counts the modules of both packages that are running in a thread."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of the finders after this one; running the module is counted."""
        if name.partition(".")[0] not in PACKAGES:
            return None
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._count(spec.loader)
        return spec

    def _count(self, loader: Any) -> None:
        run = loader.exec_module

        def counted(module: ModuleType) -> None:
            self._thread.running = getattr(self._thread, "running", 0) + 1
            try:
                run(module)
            finally:
                self._thread.running -= 1
            if self._thread.running == 0 and AUTO_CLASSES in sys.modules:
                self._register()

        # on the instance, which belongs to this one module: its class, and so its source and resources, stay as is
        loader.exec_module = counted

    def _register(self) -> None:
        if MODELS not in sys.modules:
            import_module(MODELS)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
