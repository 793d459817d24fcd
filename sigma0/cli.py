"""The command line: `sigma0 generate`, `solve`, `serve`, `size`, `calibrate`, `trail`, `doctor`, `export`."""

import typer

from sigma0.commands.calibrate import calibrate
from sigma0.commands.doctor import doctor
from sigma0.commands.export import export
from sigma0.commands.generate import generate
from sigma0.commands.solve import solve
from sigma0.commands.trail import trail
from sigma0.serve.command import serve
from sigma0.serve.size_command import size

app = typer.Typer(
    help="Looped language models with a depth of its own for each token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, calibrate, solve, trail, serve, size, doctor, export):
    app.command()(command)


if __name__ == "__main__":
    app()
