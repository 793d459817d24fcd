"""Where a text ends: at ids that end it, and ahead of stop strings."""

from collections.abc import Sequence


def cut(text: str, stop: Sequence[str]) -> str:
    """The text ahead of the first stop string, as OpenAI's protocol has it; all of it where none stands in it."""
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]


def end_ids(told: int | Sequence[int] | None) -> frozenset[int]:
    """The ids that end a text, out of the `eos_token_id` of a generation config."""
    return frozenset() if told is None else frozenset([told] if isinstance(told, int) else told)
