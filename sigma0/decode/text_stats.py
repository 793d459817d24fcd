"""Statistics of the newest tokens of many texts at once: certainty of the logits, repetition of the ids, proximity.

With a C++ compiler all texts are taken in one call (`sigma0.kernels.collapse_rows`), else each in Python's own numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.ops import CollapseRule, Operations, TextMemory, certainty
from sigma0.decode.repetition import EntropyDrop, Repetition
from sigma0.decode.stats import collapse_of
from sigma0.decode.transfer import to_host

_RULE = CollapseRule()


class CountedText:
    """What is kept of a text where nothing is compiled."""

    __slots__ = ("entropy_drop", "repetition")

    def __init__(self) -> None:
        self.repetition, self.entropy_drop = Repetition(), EntropyDrop()


Text = TextMemory | CountedText


class TextStats:
    """Takes new tokens in.

    Args:
        ops: Operations of a pass.
    """

    def __init__(self, ops: Operations) -> None:
        self._ops = ops

    def text(self) -> Text:
        """What is kept of a text, before its first token."""
        return CountedText() if self._ops.collapse_rows is None else TextMemory()

    def take(self, texts: Sequence[Text], token_ids: Sequence[int], logits: Tensor | None) -> list[list[float]]:
        """Takes a token of each of N texts in.

        Args:
            texts: Updated.
            token_ids: The new id of each.
            logits: That it was sampled from, `[N, V]`; None where the ids alone are looked at.

        Returns:
            For each of the numbers named in `sigma0.decode.ops.LOGIT_STATS`, and last for the proximity of the ids
            alone, which is not rounded to float32, those of all texts; entropy and margin are NaN without logits.
        """
        certain = None if logits is None else self._certain(logits)
        if self._ops.collapse_rows is not None:
            columns: list[list[float]] = self._ops.collapse_rows(texts, token_ids, certain, _RULE).tolist()
            return columns
        entropies, margins = [[float("nan")] * len(texts)] * 2 if certain is None else certain.tolist()
        lines = []
        for text, token_id, entropy, margin in zip(texts, token_ids, entropies, margins, strict=True):
            assert isinstance(text, CountedText)
            text.repetition.append(token_id)
            repeated = text.repetition.at(-1)
            statistics = collapse_of(entropy, margin, repeated, text.entropy_drop, _RULE)
            lines.append((*np.array(statistics, dtype=np.float32).tolist(), repeated.proximity(_RULE)))
        return [list(column) for column in zip(*lines, strict=True)]

    def _certain(self, logits: Tensor) -> Tensor:
        """Entropies and margins on the host, float32 `[2, N]`."""
        if self._ops.certainty_rows is not None:
            return self._ops.certainty_rows(logits)
        return torch.from_numpy(to_host(torch.stack(certainty(logits))))
