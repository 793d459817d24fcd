"""Does the exit know when to stop? Exit depths beside difficulty and the oracles, and what saturation says of errors.

For a token whose argmax at loop t is a_t, T loops in all, the *oracle* is the first t with a_t = a_T, and the *settled
oracle* the first t from which on every a_s = a_T: the first can be luck, the second is when nothing changes any more.
Both are read under teacher forcing on known answers. Abstention is measured on free runs at full depth: a whole answer
is right or wrong, and each score is a doubt of it.

The exit rules are compared each at the cheapest threshold that keeps a stated agreement with full depth, chosen on
answers of the calibration split and judged on those of another one. Prompts have no part in the choice: they run at
full depth whatever the rule.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr
from transformers import PreTrainedTokenizerFast

from sigma0.bench.gate.doubt import read_doubts
from sigma0.bench.pocket.data import Encoded, encode
from sigma0.bench.pocket.items import Item, check_split
from sigma0.bench.pocket.prompts import free_runs, micro_world
from sigma0.bench.pocket.world import draw
from sigma0.bench.verdict.scores import measure_abstention
from sigma0.calibrate.agreement import GRIDS
from sigma0.calibrate.bootstrap import bootstrap, clustered_share
from sigma0.calibrate.teacher_forcing import Bools, ForcedText, Ints, LoopReadings, read_forced, read_grids
from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule
from sigma0.models import OuroForCausalLM

# The word that had to be found, another word of the answer, its end, or the prompt.
KINDS = ("key", "answer", "end", "prompt")
_RULE = "rule"
# Drawing whole items anew and ranking them again is slow.
_RANK_RESAMPLES = 200
Figures = dict[str, Any]


def measure_gate(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    exit_config: ExitConfig | None = None,
    n: int = 1000,
    rules_n: int = 200,
    split: str = "test",
    seed: int = 0,
    on_step: Callable[[int], None] = lambda done: None,
) -> Figures:
    """Ask one question about each of n stories of the micro-world, every other one as chat.

    Answers end in `<|im_end|>`. By default the rule is the checkpoint's own; the rules are compared on the first
    `rules_n` questions. `on_step` is told of 2 n steps and one for each rule.

    Returns:
        Plain JSON values. Depths of groups of tokens (`by_kind`; of answer tokens and of the keys among them
        `by_difficulty` of the story) are the mean loops from 1 of the `exit` and of both oracles, and the share of
        exits with full depth's argmax, interval over questions. `correlations` are Spearman's rho of the exit depth,
        None where one side is constant; `abstention` says how well each score tells `wrong` answers. The `rules` are
        as `compare_rules` has them; `oracle_saved` and `settled_saved` are the passes_saved of the oracles on the same
        questions: 1 - mean depth / T, first tokens left out.

    Raises:
        ValueError: On fewer than two questions, the calibration split, or a model without a gate.
    """
    if not model.has_gate:
        raise ValueError(f"{name!r} has no exit gate to look at: take one that has, or `bench stability` or `fidelity`")
    if not 2 <= rules_n <= n:
        raise ValueError(
            f"n {n!r} and rules_n {rules_n!r}: at least 2 questions, and no more for the rules than in all"
        )
    if check_split(split) == "calibration":
        raise ValueError("split 'calibration' chooses the thresholds; measure on 'test' or 'train'")
    config = model.resolve_exit_config(exit_config)
    rule = model.exit_rule(config)
    items = _items(split, seed, n)
    readings, kinds = read_items(model, tokenizer, {_RULE: rule}, items, on_step)
    prompts = list(micro_world(n, split, seed))
    doubts = read_doubts(model, tokenizer, rule, prompts, lambda done: on_step(n + done))
    rules = compare_rules(model, tokenizer, rules_n, split, seed, on_rule=lambda done: on_step(2 * n + done))
    wrong = np.array([doubt.wrong for doubt in doubts], dtype=np.float64)
    scores = {score: np.array([doubt.scores[score] for doubt in doubts]) for score in doubts[0].scores}
    difficulty, hops = (np.array([getattr(item, entry) for item in items]) for entry in ("difficulty", "hops"))
    level = difficulty[readings.text]
    answers, keys = kinds != "prompt", kinds == "key"
    groups = {kind: kinds == kind for kind in KINDS} | {"answers": answers, "all": np.full(len(kinds), True)}
    against = {
        "difficulty": level,
        "hops": hops[readings.text],
        "oracle": readings.oracle,
        "settled oracle": readings.settled,
    }

    def by_difficulty(mask: Bools) -> Figures:
        return {str(entry): _depths(readings, mask & (level == entry)) for entry in np.unique(level[mask])}

    def saved(depths: Iterable[Sequence[int]]) -> float:
        return 1 - float(np.mean([depth for answer in depths for depth in answer])) / model.num_loops

    return {
        "model": name,
        "rule": config.to_dict(),
        "total_loops": model.num_loops,
        "split": split,
        "seed": seed,
        "items": n,
        "by_kind": {kind: _depths(readings, mask) for kind, mask in groups.items()},
        "by_difficulty": by_difficulty(answers),
        "key_by_difficulty": by_difficulty(keys),
        "correlations": {
            f"exit depth and {other}, {what}": _correlate(
                readings.exits[_RULE][mask], values[mask], readings.text[mask]
            )
            for what, mask in (("answer tokens", answers), ("keys", keys))
            for other, values in against.items()
        },
        "wrong": float(wrong.mean()),
        "abstention": {score: asdict(measure_abstention(values, wrong)) for score, values in scores.items()},
        "rules": rules,
        "rules_items": rules_n,
        "oracle_saved": saved(doubt.oracle for doubt in doubts[:rules_n]),
        "settled_saved": saved(doubt.settled for doubt in doubts[:rules_n]),
    }


def compare_rules(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    n: int,
    split: str,
    seed: int,
    target: float = 0.98,
    on_rule: Callable[[int], None] = lambda done: None,
) -> dict[str, Figures | None]:
    """Choose a threshold for each rule on n calibration stories, and measure it on n of another split.

    Returns:
        For each rule of `GRIDS` its settings, the share of all teacher-forced tokens with full depth's argmax at the
        exit (`agreement`) and of answer tokens alone, the mean exit `depth` of these, and `free` runs beside full
        depth; None where none of its thresholds reaches the target, an agreement on answer tokens.
    """
    if not 0 < target <= 1:
        raise ValueError(f"target {target!r} is not in (0, 1]")
    tuning = forced_texts(_encoded(tokenizer, _items("calibration", seed, n)))
    grids = {mode: [model.exit_rule(config) for config in grid] for mode, grid in GRIDS.items()}
    read = read_grids(model, grids, tuning)
    chosen = {}
    for mode, grid in GRIDS.items():
        exits = read.exits[mode]
        good = [place for place, depths in enumerate(exits) if read.same_at(depths).mean() >= target]
        if good:
            chosen[mode] = grid[min(good, key=lambda place: float(exits[place].mean()))]
    rules = {mode: model.exit_rule(config) for mode, config in chosen.items()}
    readings, kinds = read_items(model, tokenizer, rules, _items(split, seed, n))
    # in a chat the template's line break follows an answer's end
    answers = kinds != "prompt"
    rows: dict[str, Figures | None] = {}
    for done, mode in enumerate(GRIDS, start=1):
        rows[mode] = None
        if mode in chosen:
            rows[mode] = {
                "rule": asdict(chosen[mode]),
                "agreement": agreement(readings, mode),
                "agreement_on_answers": agreement(readings, mode, answers),
                "depth": float(readings.exits[mode][answers].mean()),
                "free": free_runs(model, tokenizer, n, split, seed, chosen[mode]),
            }
        on_rule(done)
    return rows


def read_items(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rules: Mapping[str, ExitRule],
    items: Sequence[Item],
    on_item: Callable[[int], None] = lambda done: None,
) -> tuple[LoopReadings, NDArray[np.str_]]:
    """Read items with their known answers at every loop, every other one as chat.

    Returns:
        The N predicted tokens, and which of `KINDS` each is, `[N]`. The key is the last token of the answer that ends
        the key's word.
    """
    rows = _encoded(tokenizer, items)
    readings = read_forced(model, rules, forced_texts(rows), on_item)
    kinds: list[str] = []
    for row, item in zip(rows, items, strict=True):
        current = ["answer" if marked else "prompt" for marked in row.answer]
        current[max(place for place, marked in enumerate(row.answer) if marked)] = "end"
        words = [tokenizer.decode([token]).strip() for token in row.ids]
        keys = [k for k, word in enumerate(words) if current[k] == "answer" and word and item.key.endswith(word)]
        current[keys[-1]] = "key"
        kinds += current[1:]
    return readings, np.array(kinds)


def agreement(readings: LoopReadings, rule: str, mask: Bools | slice = slice(None)) -> Figures:
    """Share of tokens whose argmax at the exit is full depth's, interval over items."""
    items = np.unique(readings.text[mask], return_inverse=True)[1]
    same = readings.same_at(readings.exits[rule])[mask]
    result = clustered_share(np.bincount(items, same), np.bincount(items))
    assert result is not None
    return asdict(result)


def forced_texts(rows: Iterable[Encoded]) -> list[ForcedText]:
    """Texts whose answers are given."""
    return [ForcedText(tuple(row.ids), sum(row.answer)) for row in rows]


def _encoded(tokenizer: PreTrainedTokenizerFast, items: Sequence[Item]) -> list[Encoded]:
    return [encode(tokenizer, [item], number % 2 == 1) for number, item in enumerate(items)]


def _items(split: str, seed: int, n: int) -> list[Item]:
    return [draw(split, seed, index, questions=1).items[0] for index in range(n)]


def _depths(readings: LoopReadings, mask: Bools) -> Figures:
    return {
        "tokens": int(mask.sum()),
        "exit": float(readings.exits[_RULE][mask].mean()),
        "oracle": float(readings.oracle[mask].mean()),
        "settled": float(readings.settled[mask].mean()),
        "agreement": agreement(readings, _RULE, mask),
    }


def _correlate(left: Ints, right: Ints, item: Ints) -> Figures | None:
    order = np.argsort(item, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(item[order])) + 1)

    def rho(drawn: Ints) -> float | None:
        tokens = np.concatenate([members[index] for index in drawn])
        if np.ptp(left[tokens]) == 0 or np.ptp(right[tokens]) == 0:
            return None
        return float(spearmanr(left[tokens], right[tokens]).statistic)

    result = bootstrap(rho, len(members), _RANK_RESAMPLES)
    return None if result is None else asdict(result)
