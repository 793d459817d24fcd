"""Does the exit know when to stop? Exit depths beside difficulty and the oracles, and what saturation says of errors.

For a token whose argmax at loop t is a_t, T loops in all, the *oracle* is the first t with a_t = a_T, and the *settled
oracle* the first t from which on every a_s = a_T: the first can be luck, the second is when nothing changes any more.
Both are read under teacher forcing on known answers. Abstention is measured on free runs at full depth: a whole answer
is right or wrong, and each score is a doubt of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from transformers import PreTrainedTokenizerFast

from sigma0.bench.abstention import Abstention, measure_abstention
from sigma0.bench.pocket.data import chat_text, encode, plain_text
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import draw
from sigma0.exits import ExitRule, select_exits
from sigma0.models import OuroForCausalLM
from sigma0.settings import ExitConfig

KINDS = ("key", "answer", "end", "prompt")
LONGEST_ANSWER = 24
_ROWS = 25
_RESAMPLES = 1000


@dataclass(frozen=True)
class Tokens:
    """Every predicted token of the teacher-forced texts; arrays `[N]`."""

    kind: NDArray[np.int64]
    item: NDArray[np.int64]
    exit: NDArray[np.int64]
    oracle: NDArray[np.int64]
    settled: NDArray[np.int64]
    same: NDArray[np.bool_]

    def where(self, keep: NDArray[np.bool_]) -> "Tokens":
        """The tokens marked in `keep`."""
        return Tokens(**{name: value[keep] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Depths:
    """Mean loops of a group of tokens, and the share of exits with full depth's argmax, with a 95 % interval over items."""

    tokens: int
    exit: float
    oracle: float
    settled: float
    agreement: float
    agreement_interval: tuple[float, float]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation with a 95 % bootstrap interval over items; None where one side is constant."""

    rho: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class GateReport:
    """What `measure_gate` found."""

    model: str
    rule: dict[str, object]
    total_loops: int
    split: str
    seed: int
    items: int
    by_kind: dict[str, Depths]
    by_difficulty: dict[str, Depths]
    correlations: dict[str, Correlation]
    wrong: float
    abstention: dict[str, Abstention]


def measure_gate(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    exit_config: ExitConfig | None = None,
    n: int = 1000,
    split: str = "test",
    seed: int = 0,
    on_item: Callable[[int], None] = lambda done: None,
) -> GateReport:
    """Ask one question about each of n stories of the micro-world, every other one as chat.

    Args:
        model: A looped model.
        tokenizer: Its tokenizer; answers end in `<|im_end|>`.
        name: What the report calls the model.
        exit_config: The rule to look at; by default the checkpoint's own.
        n: Questions, at least 2.
        split: "train", "calibration" or "test".
        seed: Seed of the stories.
        on_item: Told how many of the 2 n steps are done.

    Raises:
        ValueError: On fewer than two questions.
    """
    if n < 2:
        raise ValueError(f"n {n!r} is below 2")
    config = model.resolve_exit_config(exit_config)
    rule = model.exit_rule(config)
    items = [draw(split, seed, index, questions=1).items[0] for index in range(n)]
    parts = []
    for start in range(0, n, _ROWS):
        parts.append(_forced(model, tokenizer, rule, items[start : start + _ROWS], start))
        on_item(min(start + _ROWS, n))
    tokens = Tokens(**{key: np.concatenate([getattr(part, key) for part in parts]) for key in vars(parts[0])})
    doubts, wrong = [], []
    for start in range(0, n, _ROWS):
        for doubt, miss in _free(model, tokenizer, rule, items[start : start + _ROWS], start):
            doubts.append(doubt)
            wrong.append(miss)
        on_item(n + min(start + _ROWS, n))
    missed = np.array(wrong, dtype=np.float64)
    difficulty = np.array([item.difficulty for item in items])
    answers = tokens.where(tokens.kind != KINDS.index("prompt"))
    return GateReport(
        model=name,
        rule=config.to_dict(),
        total_loops=model.num_loops,
        split=split,
        seed=seed,
        items=n,
        by_kind={kind: _depths(tokens.where(tokens.kind == number)) for number, kind in enumerate(KINDS)},
        by_difficulty={
            str(level): _depths(answers.where(difficulty[answers.item] == level)) for level in sorted(set(difficulty))
        },
        correlations=_correlations(tokens, difficulty, np.array([item.hops for item in items])),
        wrong=float(missed.mean()),
        abstention={
            score: measure_abstention(np.array([doubt[score] for doubt in doubts]), missed, _RESAMPLES)
            for score in doubts[0]
        },
    )


@torch.no_grad()
def _forced(
    model: OuroForCausalLM, tokenizer: PreTrainedTokenizerFast, rule: ExitRule, items: Sequence[Item], first: int
) -> Tokens:
    rows = [encode(tokenizer, [item], (first + place) % 2 == 1) for place, item in enumerate(items)]
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), 0)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
    output = model.model(input_ids=ids.to(model.device), use_cache=False)  # right padding needs no mask
    chosen = select_exits(rule, output.loop_states, output.gate_logits, model.lm_head)
    top = torch.stack([model.lm_head(states).argmax(-1) for states in output.loop_states])  # [T, B, S]
    same = top == top[-1]
    oracle = same.int().argmax(0) + 1
    settled = len(top) + 1 - same.int().flip(0).cumprod(0).sum(0)
    found: dict[str, list[NDArray[np.int64]]] = {key: [] for key in Tokens.__dataclass_fields__}
    for number, (row, item) in enumerate(zip(rows, items, strict=True)):
        span = slice(0, len(row.ids) - 1)
        depths = chosen.depths[number, span]
        found["kind"].append(np.array([KINDS.index(kind) for kind in _kinds(tokenizer, row.ids, row.answer, item)[1:]]))
        found["item"].append(np.full(len(row.ids) - 1, first + number))
        found["exit"].append(depths.cpu().numpy())
        found["oracle"].append(oracle[number, span].cpu().numpy())
        found["settled"].append(settled[number, span].cpu().numpy())
        agrees = same[:, number, span].gather(0, depths[None] - 1)[0]
        found["same"].append(agrees.cpu().numpy())
    return Tokens(**{key: np.concatenate(value) for key, value in found.items()})  # type: ignore[arg-type]


def _kinds(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], answer: Sequence[bool], item: Item) -> list[str]:
    """The kind of every token; the key is the last token of the answer that ends the key's word."""
    kinds = ["answer" if marked else "prompt" for marked in answer]
    kinds[len(ids) - 1] = "end"
    words = [tokenizer.decode([token]).strip() for token in ids]
    places = [
        place for place, word in enumerate(words) if kinds[place] == "answer" and item.key.endswith(word) and word
    ]
    kinds[places[-1]] = "key"
    return kinds


@torch.no_grad()
def _free(
    model: OuroForCausalLM, tokenizer: PreTrainedTokenizerFast, rule: ExitRule, items: Sequence[Item], first: int
) -> Iterator[tuple[dict[str, float], bool]]:
    """Doubts of the answer to each item, and whether it is wrong."""
    prompts = [
        chat_text(tokenizer, [item]).rsplit(item.answer, 1)[0] if (first + place) % 2 else item.prompt
        for place, item in enumerate(items)
    ]
    batch = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    batch = batch.to(model.device)
    full = ExitConfig(mode="full")
    written = model.generate(**batch, max_new_tokens=LONGEST_ANSWER, do_sample=False, exit_config=full)
    start = batch["input_ids"].shape[1]
    mask = torch.cat([batch["attention_mask"], torch.ones_like(written[:, start:])], 1)
    output = model.model(input_ids=written, attention_mask=mask, use_cache=False)
    states = output.loop_states[:, :, start - 1 : -1]
    gates = output.gate_logits[:, :, start - 1 : -1]
    met = select_exits(rule, states, gates, model.lm_head).met
    chances = torch.softmax(model.lm_head(states[-1]).float(), -1)  # [B, N, V]
    entropy = torch.special.entr(chances).sum(-1)
    top = chances.topk(2, -1).values
    survival = torch.sigmoid(-gates.float()).prod(0)  # [B, N]
    for number, item in enumerate(items):
        ids = written[number, start:].tolist()
        end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        text = tokenizer.decode(ids[:end], skip_special_tokens=True).strip()
        span = (number, slice(0, end))
        doubt = {
            "saturated": (~met[span]).float().mean().item(),
            "gate survival": survival[span].max().item(),
            "entropy": entropy[span].max().item(),
            "margin": 1 - (top[..., 0] - top[..., 1])[span].min().item(),
            "length": float(batch["attention_mask"][number].sum()),
        }
        yield doubt, text != item.answer


def _depths(tokens: Tokens) -> Depths:
    items = np.unique(tokens.item, return_inverse=True)[1]
    right, count = np.bincount(items, tokens.same), np.bincount(items)
    rng = np.random.default_rng(0)
    draws = (rng.integers(0, len(count), len(count)) for _ in range(_RESAMPLES))
    low, high = np.percentile([right[draw].sum() / count[draw].sum() for draw in draws], [2.5, 97.5])
    return Depths(
        tokens=len(tokens.item),
        exit=float(tokens.exit.mean()),
        oracle=float(tokens.oracle.mean()),
        settled=float(tokens.settled.mean()),
        agreement=float(tokens.same.mean()),
        agreement_interval=(float(low), float(high)),
    )


def _correlations(tokens: Tokens, difficulty: NDArray[np.int64], hops: NDArray[np.int64]) -> dict[str, Correlation]:
    found = {}
    for label, kinds in (("answer tokens", (0, 1, 2)), ("keys", (0,))):
        group = tokens.where(np.isin(tokens.kind, kinds))
        against = {
            "difficulty": difficulty[group.item],
            "hops": hops[group.item],
            "oracle": group.oracle,
            "settled oracle": group.settled,
        }
        for other, values in against.items():
            found[f"exit depth and {other}, {label}"] = _correlate(group.exit, values, group.item)
    return found


def _correlate(left: NDArray[np.int64], right: NDArray[np.int64], item: NDArray[np.int64]) -> Correlation:
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return Correlation(None, None)
    order = np.argsort(item, kind="stable")
    bounds = np.flatnonzero(np.diff(item[order])) + 1
    members = np.split(order, bounds)
    rng = np.random.default_rng(0)
    values = []
    for _ in range(_RESAMPLES // 5):
        drawn = np.concatenate([members[index] for index in rng.integers(0, len(members), len(members))])
        if np.ptp(left[drawn]) and np.ptp(right[drawn]):
            values.append(spearmanr(left[drawn], right[drawn]).statistic)
    low, high = np.percentile(values, [2.5, 97.5])
    return Correlation(float(spearmanr(left, right).statistic), (float(low), float(high)))
