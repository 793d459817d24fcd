"""Checks before a run, and doors after it, which every unit has in common."""

from collections.abc import Sequence
from importlib.metadata import version

from sigma0.ladder.trail import Trail
from sigma0.ladder.triggers import Trigger, trigger_from_dict, trigger_to_dict
from sigma0.signals.verdict import Door

_LIBRARIES = ("sigma0-lm", "torch", "transformers")


def check_policy(policy: Trigger) -> None:
    """Checks that a trail can hold a policy.

    Raises:
        ValueError: For a trigger of another kind.
    """
    try:
        trigger_from_dict(trigger_to_dict(policy))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"policy is a {type(policy).__name__}: only the triggers of sigma0.ladder can stand in a trail"
        ) from error


def check_settings(max_new_tokens: int, stop: Sequence[str], sources: Sequence[str]) -> None:
    """Checks settings that every unit takes.

    Raises:
        ValueError: Naming the setting.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}")
    for name, value in (("stop", stop), ("sources", sources)):
        if isinstance(value, str):
            raise ValueError(f"{name} takes a list of strings, got the string {value[:40]!r}")
    if not all(stop):
        raise ValueError("a stop string must not be empty")


def final_door(aborted: bool, converges: bool, exhausted: bool) -> Door:
    """The door of a whole text, see `LadderGeneration.door`.

    Args:
        aborted: Whether the budget kept something from going up.
        converges: Whether the verdict opens the converge door.
        exhausted: Whether no rung is left above: the highest one was tried.
    """
    if aborted:
        return "abort"
    if converges:
        return "converge"
    return "abort" if exhausted else "escalate"


def not_tried(trail: Trail, names: Sequence[str]) -> tuple[str, ...]:
    """Rung and limit of each kind of step that the budget refused."""
    refused = {
        f"{names[min(line.rung + (line.why != 'parked'), len(names) - 1)]}: {line.lacking}"
        for line in trail.decisions
        if line.lacking is not None
    }
    return tuple(sorted(refused)) or (f"{names[0]}: the next step",)


def versions() -> dict[str, str]:
    """Versions of the libraries that decisions depend on."""
    return {name: version(name) for name in _LIBRARIES}
