"""From ids to the text that may be shown: whole characters only, and nothing of a stop string."""

from typing import Any

from tokenizers.decoders import DecodeStream

from sigma0.decode.stopping import StopCut


class TextFeed:
    """The text of one request as its ids come.

    Args:
        tokenizer: A fast tokenizer.
        stop: Strings that end the text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._cut = StopCut(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0

    @property
    def text(self) -> str:
        """What was shown so far."""
        return self._cut.passed

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._cut.found

    def add(self, token_id: int) -> str:
        """What may be shown once an id has come."""
        self._ids.append(token_id)
        new = self._decoder.step(self._tokenizer.backend_tokenizer, token_id) or ""
        self._decoded += len(new)
        return self._cut.feed(new)

    def end(self) -> str:
        """What else may be shown once no id is to come: an unfinished character, and what looked like a stop string."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._cut.feed(str(whole[self._decoded :])) + self._cut.flush()
