"""`python -m sigma0.bench`: the benchmarks."""

import sys

from sigma0.extras import needs_extra

try:
    with needs_extra("bench"):
        from sigma0.bench.commands import app as app
except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    app()
