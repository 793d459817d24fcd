"""What a harness may say of a model: which checkpoint, where it runs, and how deep its tokens loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast, get_args
from weakref import WeakValueDictionary

from sigma0.commands.options import exit_settings
from sigma0.config import Effort, ExitConfig, exit_for
from sigma0.models.load import load

# the harness's name of each field of `ExitConfig`; the mode is called as on the command line
EXIT_ARGUMENTS = {
    "exit": "mode",
    **{name: name for name in ("q", "eps", "patience", "theta", "depth", "min_loops", "after_exit", "redraft")},
}
PLACES = ("device", "dtype", "backend")


class Loaded:
    """Weights in memory, one copy for all that ask for the same."""

    def __init__(self, name: str, places: Mapping[str, Any]) -> None:
        self.model, self.tokenizer = load(name, **places)
        # held by whoever runs the model
        self.alone = Lock()


# Inspect makes a model anew for every generation setting; weights that nobody uses any more are let go
_LOADED: "WeakValueDictionary[tuple[Any, ...], Loaded]" = WeakValueDictionary()


@dataclass(frozen=True)
class Opened:
    """A model that a harness asked for."""

    name: str  # As it was asked for
    loaded: Loaded  # Its weights, which others may share
    exit_config: ExitConfig  # The exit setting at effort `medium`: the checkpoint's, changed by what was given
    effort: Effort  # Where none is asked for

    @property
    def model(self) -> Any:
        """The looped model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """Its fast tokenizer, padding on the left."""
        return self.loaded.tokenizer

    def exit_at(self, effort: str | None = None) -> ExitConfig:
        """The exit setting in force; no effort takes the model's own."""
        return exit_for(self.effort if effort is None else check_effort(effort), self.exit_config, self.model.num_loops)


def check_effort(effort: str) -> Effort:
    """The effort, once it is sure that it is one."""
    if effort not in get_args(Effort):
        raise ValueError(f"a looped model knows the efforts {', '.join(get_args(Effort))}, got {effort!r}")
    return cast(Effort, effort)


def open_model(name: str, arguments: Mapping[str, Any]) -> Opened:
    """Loads a model as a harness's arguments say.

    They are `device`, `dtype` and `backend` as `sigma0.load` takes them, `effort`, and the exit setting: `exit` for its
    mode, the rest by their names in `ExitConfig`. None counts as not given.

    Raises:
        ValueError: For an unknown argument or a bad value.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    known = (*PLACES, "effort", *EXIT_ARGUMENTS)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"a sigma0 model takes no argument {', '.join(unknown)}, only {', '.join(known)}")
    effort = check_effort(str(given.get("effort", "medium")))
    places = {key: given[key] for key in PLACES if key in given}
    key = (name, *sorted(places.items()))
    # held here until it is returned: the dictionary alone would let it go
    loaded = _LOADED.get(key) or Loaded(name, places)
    _LOADED[key] = loaded
    options = {field: given[key] for key, field in EXIT_ARGUMENTS.items() if key in given}
    exit_config = exit_settings(options, loaded.model.resolve_exit_config(None), written="{}=")
    exit_config = loaded.model.resolve_exit_config(exit_config)
    exit_config.stops_at(loaded.model.num_loops)
    return Opened(name, loaded, exit_config, effort)
