"""The models inside this package."""

from pathlib import Path

CHECKPOINTS = Path(__file__).parent


def shipped_models() -> tuple[str, ...]:
    """Names of the models inside this package."""
    return tuple(sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))
