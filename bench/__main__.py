"""`python -m sigma0.bench`: the benchmarks."""

from sigma0.bench.commands import app

if __name__ == "__main__":
    app()
