"""Statistics of texts, id by id: repetition among their ids, and the logits that these were sampled from.

With the functions in C++ the ids of all texts are taken in one call (`sigma0.kernels.collapse_rows`), else each by the
formulas in torch (`sigma0.kernels.collapse`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.decode.ops import (
    FULL_ECHO,
    LOGIT_STATS,
    NGRAM,
    CollapseRule,
    CollapseState,
    Operations,
    TextMemory,
    certainty,
    collapse_reference,
)
from sigma0.decode.transfer import to_host

# What is kept of a text.
Text = TextMemory | CollapseState


class TextStats:
    """Takes new ids of texts in.

    Args:
        ops: Operations of a pass.
        rule: Parts of the proximity.
    """

    def __init__(self, ops: Operations, rule: CollapseRule | None = None) -> None:
        self._ops, self._rule = ops, rule or CollapseRule()

    def text(self) -> Text:
        """What is kept of a text, before its first id."""
        return CollapseState.empty(1, "cpu") if self._ops.collapse_rows is None else TextMemory()

    def take(self, texts: Sequence[Text], token_ids: Sequence[int], logits: Tensor | None = None) -> list[list[float]]:
        """Takes an id of each of N texts in, or several of one in their order.

        Args:
            texts: Updated.
            token_ids: The new id of each.
            logits: That it was sampled from, `[N, V]`; None where the ids alone are looked at.

        Returns:
            For each of the numbers named in `sigma0.decode.ops.LOGIT_STATS`, and last for the proximity of the ids
            alone, which is not rounded to float32, those of all texts; entropy and margin are NaN without logits.
        """
        ops = self._ops
        if ops.collapse_rows is not None:
            certain = None  # entropies and margins on the host, float32 `[2, N]`
            if logits is not None and ops.certainty_rows is not None:
                certain = ops.certainty_rows(logits)
            elif logits is not None:
                certain = torch.from_numpy(to_host(torch.stack(certainty(logits))))
            return ops.collapse_rows(texts, token_ids, certain, self._rule)
        rows = torch.full((len(texts), 2), torch.nan) if logits is None else logits.cpu()
        lines = [self._counted(*item) for item in zip(texts, token_ids, rows, strict=True)]
        return [list(column) for column in zip(*lines, strict=True)]

    def _counted(self, text: Text, token_id: int, logits: Tensor) -> list[float]:
        assert isinstance(text, CollapseState)
        first = torch.zeros(1, dtype=torch.int64)
        output = collapse_reference(logits[None], torch.tensor([token_id]), text, first, self._rule)
        numbers: list[float] = output.statistics[0].tolist()
        named = dict(zip(LOGIT_STATS, numbers, strict=True))
        weight = min(1.0, max(0.0, (int(text.lengths) - NGRAM + 1) / FULL_ECHO))
        ids_alone = named["periodicity"], named["echo"] * weight, 1 - named["distinct"]
        return [*numbers, self._rule.of_numbers(*ids_alone, 0.0, 0.0)]


@dataclass(frozen=True)
class CollapseStop:
    """When a sequence has collapsed and is ended: its proximity, of the ids alone, stays high.

    How both were chosen, and what they cost: `python -m sigma0.bench collapse`.
    """

    tau: float = 0.9  # Proximity that must be reached after each of the last `running` ids
    running: int = 16  # Number of consecutive ids
    every: int = 4  # Checked when the number of ids is a multiple of it

    def ends_after(self, tokens: int, high: int) -> bool:
        """Whether a sequence of so many ids is ended, after the last `high` of which the proximity reached tau."""
        return high >= self.running and tokens % self.every == 0
