"""From ids to the text that may be shown: whole characters only, and nothing of a stop string."""

from typing import Any

from tokenizers.decoders import DecodeStream


class TextFeed:
    """The text of one request as its ids come.

    Args:
        tokenizer: A fast tokenizer.
        stop: Strings that end the text.

    Attributes:
        text: What was shown so far.
        stopped: Whether a stop string came.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """What may be shown once an id has come."""
        self._ids.append(token_id)
        new = self._decoder.step(self._tokenizer.backend_tokenizer, token_id) or ""
        self._decoded += len(new)
        return self._show(new, False)

    def end(self) -> str:
        """What else may be shown once no id is to come: an unfinished character, and what looked like a stop string."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._show(str(whole[self._decoded :]), True)

    def _show(self, new: str, everything: bool) -> str:
        self._held += new
        places = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.stopped = True
            shown, self._held = self._held[: min(places)], ""
        else:
            kept = 0 if everything else max((_begun(self._held, stop) for stop in self._stop), default=0)
            shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self.text += shown
        return shown


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string may have begun."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
