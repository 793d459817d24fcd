"""From token ids to text: incremental detokenizing, stop strings and EOS ids."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


def eos_ids(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """The ids that end a sequence, from the `eos_token_id` of a generation config."""
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string, as OpenAI's protocol has it; the whole text if it has none."""
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]


class StopChecker:
    """Passes text through up to the first stop string; holds back what may be the beginning of one.

    Args:
        stop: Strings that end the text.

    Attributes:
        stopped: Whether a stop string was met.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._pending = ""
        self._pieces: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Text passed through so far."""
        return "".join(self._pieces)

    def add(self, piece: str) -> str:
        """The text that is released by one more piece."""
        if not self._stop:
            self._pieces.append(piece)
            return piece
        if self.stopped:
            return ""
        text = self._pending + piece
        starts = [start for start in (text.find(string) for string in self._stop) if start >= 0]
        if starts:
            self.stopped = True
            return self._release(text[: min(starts)], "")
        keep = max((_overlap(text, string) for string in self._stop), default=0)
        return self._release(text[: len(text) - keep], text[len(text) - keep :])

    def flush(self) -> str:
        """The text that was held back, at the end of the sequence."""
        return self._release(self._pending, "")

    def _release(self, text: str, pending: str) -> str:
        self._pieces.append(text)
        self._pending = pending
        return text


class IncrementalDetokenizer:
    """Text of one sequence, token by token: whole characters only, and nothing of a stop string.

    Args:
        tokenizer: A fast tokenizer.
        stop: Strings that end the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        self._checker = StopChecker(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return self._checker.text

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._checker.stopped

    def add(self, token_id: int) -> str:
        """The text that is released by one more id."""
        self._ids.append(token_id)
        new = self._decoder.step(self._backend, token_id) or ""
        self._decoded += len(new)
        return self._checker.add(new)

    def end(self, last_id: int | None = None) -> str:
        """The rest of the text, with an unfinished character and what was held back as a possible stop string.

        Args:
            last_id: A last id that was not added; None for none.
        """
        if last_id is not None:
            self._ids.append(last_id)
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._checker.add(str(whole[self._decoded :])) + self._checker.flush()


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper prefix of `string` that `text` ends in."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
