"""The commands of `python -m sigma0.bench strategyqa`: `levels`, which needs no name, and `distill`."""

from typing import Any

import typer
from typer.core import TyperGroup

from sigma0.bench.strategyqa.command import levels
from sigma0.bench.strategyqa.distil_command import distill


class _LevelsByDefault(TyperGroup):
    """Takes options without a command's name for those of `levels`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name in where there is none."""
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named or not args else ["levels", *args])


strategyqa = typer.Typer(
    cls=_LevelsByDefault, no_args_is_help=True, help="Levels of control on yes or no questions, and distillation."
)
strategyqa.command()(levels)
strategyqa.command()(distill)
