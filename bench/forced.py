"""Every predicted token of held-out questions with their known answers, read at all loops (teacher forcing)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from sigma0.bench.estimates import Estimate, bootstrap
from sigma0.bench.pocket.data import encode
from sigma0.bench.pocket.items import Item
from sigma0.exits import ExitRule, select_exits
from sigma0.models import OuroForCausalLM

KINDS = ("key", "answer", "end", "prompt")
_ROWS = 25

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
    parts = []
    for start in range(0, len(items), _ROWS):
        parts.append(_read(model, tokenizer, rules, items[start : start + _ROWS], start))
        on_item(min(start + _ROWS, len(items)))
    return Tokens(
        kind=np.concatenate([part.kind for part in parts]),
        item=np.concatenate([part.item for part in parts]),
        oracle=np.concatenate([part.oracle for part in parts]),
        settled=np.concatenate([part.settled for part in parts]),
        exits={name: np.concatenate([part.exits[name] for part in parts]) for name in rules},
        same={name: np.concatenate([part.same[name] for part in parts]) for name in rules},
    )


def agreement(tokens: Tokens, rule: str) -> Estimate:
    """Share of tokens whose argmax at the exit is full depth's, interval over items."""
    items = np.unique(tokens.item, return_inverse=True)[1]
    same, count = np.bincount(items, tokens.same[rule]), np.bincount(items)
    found = bootstrap(lambda drawn: float(same[drawn].sum() / count[drawn].sum()), len(count))
    assert found is not None
    return found


@torch.no_grad()
def _read(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rules: Mapping[str, ExitRule],
    items: Sequence[Item],
    first: int,
) -> Tokens:
    rows = [encode(tokenizer, [item], (first + place) % 2 == 1) for place, item in enumerate(items)]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
    # Pads stand on the right, where no real token sees them.
    output = model.model(input_ids=ids.to(model.device), use_cache=False)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row.ids) - 1) for row in rows], batch_first=True).bool()
    states = output.loop_states[:, :, :-1][:, real.to(model.device)]  # [T, N, D]
    gates = output.gate_logits[:, :, :-1][:, real.to(model.device)]  # [T, N]
    top = torch.stack([model.lm_head(state).argmax(-1) for state in states])  # [T, N]
    same = top == top[-1]
    exits, agrees = {}, {}
    for name, rule in rules.items():
        depths = select_exits(rule, states[:, None], gates[:, None], model.lm_head).depths[0]
        exits[name] = depths.cpu().numpy()
        agrees[name] = same.gather(0, depths[None] - 1)[0].long().cpu().numpy()
    kinds = [
        kind for row, item in zip(rows, items, strict=True) for kind in _kinds(tokenizer, row.ids, row.answer, item)
    ]
    return Tokens(
        kind=np.array(kinds),
        item=np.repeat(np.arange(first, first + len(rows)), [len(row.ids) - 1 for row in rows]),
        oracle=(same.int().argmax(0) + 1).cpu().numpy(),
        settled=(len(top) + 1 - same.int().flip(0).cumprod(0).sum(0)).cpu().numpy(),
        exits=exits,
        same=agrees,
    )


def _kinds(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], answer: Sequence[bool], item: Item) -> list[int]:
    """The kind of every predicted token; the key is the last token of the answer that ends the key's word."""
    kinds = ["answer" if marked else "prompt" for marked in answer]
    kinds[max(place for place, marked in enumerate(answer) if marked)] = "end"
    words = [tokenizer.decode([token]).strip() for token in ids]
    keys = [place for place, word in enumerate(words) if kinds[place] == "answer" and word and item.key.endswith(word)]
    kinds[keys[-1]] = "key"
    return [KINDS.index(kind) for kind in kinds[1:]]
