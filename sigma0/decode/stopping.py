"""Text that ends ahead of a stop string, though tokens end where they like."""

from collections.abc import Sequence


class StopCut:
    """Lets text pass up to the first stop string; what may be the beginning of one is held back.

    Args:
        stop: Strings that end the text.

    Attributes:
        passed: What was let through so far.
        found: Whether a stop string came.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.passed = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """What may be shown now that a piece came."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [place for place in (text.find(string) for string in self._stop) if place >= 0]
        if ends:
            self.found = True
            return self._let(text[: min(ends)], "")
        keep = max((_overlap(text, string) for string in self._stop), default=0)
        return self._let(text[: len(text) - keep], text[len(text) - keep :])

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        return self._let(self._held, "")

    def _let(self, text: str, held: str) -> str:
        self.passed += text
        self._held = held
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper beginning of `string` that `text` ends in."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
