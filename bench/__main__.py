"""`python -m sigma0.bench`: the benchmarks."""

import sys

import typer

from sigma0.extras import needs_extra

try:
    with needs_extra("bench"):
        from sigma0.bench.commands import app as app
except ValueError as error:
    typer.echo(f"error: {error}", err=True)
    sys.exit(2)

if __name__ == "__main__":
    app()
