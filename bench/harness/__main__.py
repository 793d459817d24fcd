"""`python -m sigma0.bench.harness`: lm-eval's own command line, with the model `sigma0` beside its others."""

import sys
from importlib import import_module

from sigma0.extras import needs_extra
from sigma0.rendering import quiet_transformers


def main() -> None:
    """Registers the model and hands over."""
    try:
        with needs_extra("eval"):
            from lm_eval.__main__ import cli_evaluate

            # lm-eval knows the models that were imported
            import_module("sigma0.bench.harness.language_model")
    except ValueError as error:
        sys.exit(f"error: {error}")
    quiet_transformers()
    cli_evaluate()


if __name__ == "__main__":
    main()
