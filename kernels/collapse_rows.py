"""Statistics of logits and ids on a CPU, for the newest id of many texts in one call; as `collapse.py` has them.

Repetition is counted id by id: a text keeps its matches at every lag and the numbers of its distinct ids and 4-grams,
so an id costs a look at the last 128, 0.4 us. Entropy and margin take two sweeps over the logits, where torch takes
seven operations.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sigma0.kernels.collapse import LOGIT_STATS, CollapseRule
from sigma0.kernels.native import function


class TextMemory:
    """What is kept of a text, before its first id; the memory belongs to the functions in C++."""

    __slots__ = ("_bytes", "pointer")

    def __init__(self) -> None:
        self._bytes = torch.zeros(_size(), dtype=torch.uint8)
        self.pointer: int = self._bytes.data_ptr()


def collapse_rows(
    texts: Sequence[TextMemory], token_ids: Sequence[int], certain: Tensor | None, rule: CollapseRule
) -> list[list[float]]:
    """Takes an id of each of N texts in, or several of one in their order.

    Args:
        texts: Updated.
        token_ids: The id of each.
        certain: Entropies and margins of the logits that they were sampled from, float32 `[2, N]`; None where they are
            not known: they are NaN then, and take no part in the proximity.
        rule: Parts of the proximity.

    Returns:
        The numbers named in `LOGIT_STATS`, to float32, and last the proximity of the ids alone, `[9, N]`.
    """
    count, columns = len(texts), len(LOGIT_STATS) + 1
    output = array("d", bytes(8 * count * columns))
    pointers, ids = array("q", [text.pointer for text in texts]), array("q", token_ids)
    _collapse()(
        pointers.buffer_info()[0],
        ids.buffer_info()[0],
        None if certain is None else certain.data_ptr(),
        rule.numbers.buffer_info()[0],
        output.buffer_info()[0],
        count,
    )
    return [output[column * count : (column + 1) * count].tolist() for column in range(columns)]


def certainty_rows(logits: Tensor) -> Tensor:
    """Entropy and margin, float32 `[2, N]`, as `collapse.certainty`.

    Args:
        logits: `[N, V]`, with V at least 2.
    """
    logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    output = torch.empty((2, len(logits)))
    _certainty()(logits.data_ptr(), output.data_ptr(), *logits.shape, logits.stride(0))
    return output


@lru_cache
def _size() -> int:
    size: int = function("text_bytes", "", "n")()
    return size


@lru_cache
def _collapse() -> Callable[..., None]:
    return function("collapse_rows", "pppppn")


@lru_cache
def _certainty() -> Callable[..., None]:
    return function("certainty_rows", "ppnnn")
