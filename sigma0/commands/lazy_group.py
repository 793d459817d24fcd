"""A group of commands whose modules are imported when one of them is run or asked for its help."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sigma0.commands.console import loading, one_line_errors
from sigma0.errors import needs_extra


@dataclass(frozen=True)
class Target:
    """Where a command is defined.

    Attributes:
        module: Its module.
        name: Of the function, or of the Typer application, in the module.
        help: The first line of its help.
    """

    module: str
    name: str
    help: str


class LazyCommand(TyperCommand):
    """Stands for a command in the list of a group's commands.

    Args:
        name: Of the command.
        target: Where it is defined.
        extra: The extra whose libraries the module imports; None: those of a plain installation.
    """

    def __init__(self, name: str, target: Target, extra: str | None) -> None:
        super().__init__(name=name, help=target.help)
        self._target, self._extra = target, extra

    def load(self) -> Any:
        """Imports the command itself.

        Raises:
            typer.Exit: If a library of the extra is missing, after a line that names the extra.
        """
        plain = self._extra is None
        with (
            one_line_errors(),
            nullcontext() if plain else loading(str(self.name)),
            nullcontext() if plain else needs_extra(str(self._extra)),
        ):
            defined = getattr(import_module(self._target.module), self._target.name)
        if isinstance(defined, typer.Typer):
            return typer.main.get_command(defined)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name)(defined)
        return typer.main.get_command(single)


def lazy_group(targets: Mapping[str, Target], extra: str | None = None) -> type[TyperGroup]:
    """The class of a group of such commands, for `typer.Typer(cls=...)`.

    Args:
        targets: By the names of the commands, in the order in which they are listed.
        extra: As `LazyCommand` takes it.
    """

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for name, target in targets.items():
                self.add_command(LazyCommand(name, target, extra))

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, command.load() if isinstance(command, LazyCommand) else command, rest

    return LazyGroup
