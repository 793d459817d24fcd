"""A group of commands whose modules are imported when one of them is run or asked for its help."""

from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from sigma0.commands.console import loading, one_line_errors
from sigma0.errors import needs_extra


class Target(NamedTuple):
    """Where a command is defined."""

    module: str  # Its module
    name: str  # Of the function, or of the Typer application, in the module
    help: str  # The first line of its help


class LazyCommand(TyperCommand):
    """Stands for a command in a group's list; an extra has the libraries that its module imports."""

    def __init__(self, name: str, target: Target, extra: str | None) -> None:
        super().__init__(name=name, help=target.help)
        self._target, self._extra = target, extra

    def load(self) -> Any:
        """Imports the command itself; where a library is missing, ends with a line that names the extra."""
        with one_line_errors(), ExitStack() as waiting:
            if self._extra is not None:
                waiting.enter_context(loading(str(self.name)))
                waiting.enter_context(needs_extra(self._extra))
            defined = getattr(import_module(self._target.module), self._target.name)
        if not isinstance(defined, typer.Typer):
            command, defined = defined, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            defined.command(self.name)(command)
        return typer.main.get_command(defined)


def lazy_group(targets: Mapping[str, Target], extra: str | None = None) -> type[TyperGroup]:
    """The class of a group of such commands, in this order, for `typer.Typer(cls=...)`."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for name, target in targets.items():
                self.add_command(LazyCommand(name, target, extra))

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, command.load() if isinstance(command, LazyCommand) else command, rest

    return LazyGroup
