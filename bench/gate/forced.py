"""Every predicted token of held-out questions with their known answers, read at all loops (teacher forcing)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

import sigma0.calibrate.teacher_forcing
from sigma0.bench.pocket.data import Encoded, encode
from sigma0.bench.pocket.items import Item
from sigma0.calibrate.bootstrap import Estimate, clustered_share
from sigma0.calibrate.teacher_forcing import ForcedText
from sigma0.decode.exits import ExitRule
from sigma0.models import OuroForCausalLM

KINDS = ("key", "answer", "end", "prompt")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """Predicted tokens; arrays `[N]`.

    Attributes:
        kind: Index into `KINDS`: the word that had to be found, another word of the answer, its end, or the prompt.
        item: Number of the question, from 0.
        oracle: First loop whose argmax is that of loop T.
        settled: First loop from which on every argmax is that of loop T.
        exits: For each rule, the loop at which it stops.
        same: For each rule, whether the argmax there is that of loop T, 0 or 1.
    """

    kind: Ints
    item: Ints
    oracle: Ints
    settled: Ints
    exits: dict[str, Ints]
    same: dict[str, Ints]

    @property
    def is_answer(self) -> NDArray[np.bool_]:
        """Which tokens belong to an answer."""
        marks: NDArray[np.bool_] = self.kind != KINDS.index("prompt")
        return marks

    def where(self, keep: NDArray[np.bool_]) -> "Tokens":
        """The tokens marked in `keep`."""
        return Tokens(
            kind=self.kind[keep],
            item=self.item[keep],
            oracle=self.oracle[keep],
            settled=self.settled[keep],
            exits={name: values[keep] for name, values in self.exits.items()},
            same={name: values[keep] for name, values in self.same.items()},
        )


def read_forced(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rules: Mapping[str, ExitRule],
    items: Sequence[Item],
    on_item: Callable[[int], None] = lambda done: None,
) -> Tokens:
    """Read items at every loop, every other one as chat; each rule decides where it would have stopped."""
    rows = _encoded(tokenizer, items)
    found = sigma0.calibrate.teacher_forcing.read_forced(model, rules, forced_texts(tokenizer, items), on_item)
    kinds = [
        kind for row, item in zip(rows, items, strict=True) for kind in _kinds(tokenizer, row.ids, row.answer, item)
    ]
    return Tokens(
        kind=np.array(kinds),
        item=found.text,
        oracle=found.oracle,
        settled=found.settled,
        exits=found.exits,
        same={name: found.same_at(depths).astype(np.int64) for name, depths in found.exits.items()},
    )


def forced_texts(tokenizer: PreTrainedTokenizerFast, items: Sequence[Item]) -> list[ForcedText]:
    """Items with their known answers, every other one as chat."""
    return [ForcedText(tuple(row.ids), sum(row.answer)) for row in _encoded(tokenizer, items)]


def _encoded(tokenizer: PreTrainedTokenizerFast, items: Sequence[Item]) -> list[Encoded]:
    return [encode(tokenizer, [item], number % 2 == 1) for number, item in enumerate(items)]


def agreement(tokens: Tokens, rule: str) -> Estimate:
    """Share of tokens whose argmax at the exit is full depth's, interval over items."""
    items = np.unique(tokens.item, return_inverse=True)[1]
    same, count = np.bincount(items, tokens.same[rule]), np.bincount(items)
    found = clustered_share(same, count)
    assert found is not None
    return found


def _kinds(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], answer: Sequence[bool], item: Item) -> list[int]:
    """The kind of every predicted token; the key is the last token of the answer that ends the key's word."""
    kinds = ["answer" if marked else "prompt" for marked in answer]
    kinds[max(place for place, marked in enumerate(answer) if marked)] = "end"
    words = [tokenizer.decode([token]).strip() for token in ids]
    keys = [place for place, word in enumerate(words) if kinds[place] == "answer" and word and item.key.endswith(word)]
    kinds[keys[-1]] = "key"
    return [KINDS.index(kind) for kind in kinds[1:]]
