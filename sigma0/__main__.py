"""`python -m sigma0`: the command line."""

from sigma0.cli import app

if __name__ == "__main__":
    app()
