"""`python -m sigma0.bench.harness`: lm-eval's own command line, with the model `sigma0` beside its others."""

import sys
from collections.abc import Sequence
from importlib import import_module

from sigma0.errors import needs_extra


def main() -> None:
    """Registers the model and hands over."""
    try:
        with needs_extra("eval"):
            from lm_eval.__main__ import cli_evaluate

            # lm-eval knows the models that were imported
            import_module("sigma0.bench.harness.language_model")
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.argv[1:] = with_device(sys.argv[1:])
    cli_evaluate()


def with_device(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `--device auto` for the model `sigma0` where none is named.

    lm-eval takes the first GPU where nobody names a device, also where there is none.
    """
    options = [argument.partition("=")[0] for argument in arguments]
    names = [argument.partition("=")[2] or (*arguments, "")[place + 1] for place, argument in enumerate(arguments)]
    models = [name for option, name in zip(options, names, strict=True) if option in ("--model", "-M")]
    if models != ["sigma0"] or {"--device", "--config", "-C"} & set(options):
        return list(arguments)
    return [*arguments, "--device", "auto"]


if __name__ == "__main__":
    main()
