r"""The answer in a text: what stands in its last `\boxed{}`."""

import re

# characters
MAX_ANSWER = 1_000
_OPENING = re.compile(r"\\boxed\s*\{")


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{}` whose braces are balanced, spaces around it left out.

    Braces may be nested; escaped ones (`\{`) are no braces.

    Args:
        text: Any.

    Returns:
        None where there is none, or it is empty or longer than `MAX_ANSWER` characters.
    """
    for opening in reversed(list(_OPENING.finditer(text))):
        inside = _balanced(text[opening.end() : opening.end() + MAX_ANSWER + 1])
        if inside is not None:
            return inside.strip() or None
    return None


def _balanced(text: str) -> str | None:
    """A text up to the brace that closes the one in front of it."""
    depth, place = 1, 0
    while place < len(text):
        sign = text[place]
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[:place]
        place += 2 if sign == "\\" else 1
    return None
