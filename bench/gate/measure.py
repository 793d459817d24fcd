"""Does the exit know when to stop? Exit depths beside difficulty and the oracles, and what saturation says of errors.

For a token whose argmax at loop t is a_t, T loops in all, the *oracle* is the first t with a_t = a_T, and the *settled
oracle* the first t from which on every a_s = a_T: the first can be luck, the second is when nothing changes any more.
Both are read under teacher forcing on known answers. Abstention is measured on free runs at full depth: a whole answer
is right or wrong, and each score is a doubt of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr
from transformers import PreTrainedTokenizerFast

from sigma0.bench.gate.doubt import read_doubts
from sigma0.bench.gate.forced import KINDS, Ints, Tokens, agreement, read_forced
from sigma0.bench.gate.rules import RuleRow, check_measured_split, compare_rules
from sigma0.bench.pocket.world import draw
from sigma0.bench.verdict.abstention import Abstention, measure_abstention
from sigma0.calibrate.bootstrap import Estimate, bootstrap
from sigma0.config import ExitConfig
from sigma0.models import OuroForCausalLM

_RULE = "rule"
# Drawing whole items anew and ranking them again is slow.
_RANK_RESAMPLES = 200


@dataclass(frozen=True)
class Depths:
    """Mean loops of a group of tokens, and the share of exits with full depth's argmax.

    Attributes:
        tokens: Tokens in the group.
        exit: Mean loop at which the rule stops, from 1.
        oracle: Mean first loop whose argmax is that of loop T.
        settled: Mean first loop from which on every argmax is that of loop T.
        agreement: Share of the tokens whose argmax at the exit is that of loop T, interval over questions.
    """

    tokens: int
    exit: float
    oracle: float
    settled: float
    agreement: Estimate


@dataclass(frozen=True)
class GateReport:
    """What `measure_gate` found.

    Attributes:
        model: Name of the model.
        rule: The exit rule looked at.
        total_loops: T.
        split: Where the questions come from.
        seed: Seed of the stories.
        items: Questions asked.
        by_kind: Tokens by kind, and all of them.
        by_difficulty: Answer tokens by the difficulty of the story.
        key_by_difficulty: Of these the keys alone.
        correlations: Spearman's rho of the exit depth, intervals over items; None where one side is constant.
        wrong: Share of whole answers that are wrong at full depth.
        abstention: How well each score tells them.
        rules: The exit rules side by side.
        rules_items: Questions these were measured on.
        oracle_saved: passes_saved of the oracle on the same questions: 1 - mean depth / T, first tokens left out.
        settled_saved: The same of the settled oracle.
    """

    model: str
    rule: dict[str, object]
    total_loops: int
    split: str
    seed: int
    items: int
    by_kind: dict[str, Depths]
    by_difficulty: dict[str, Depths]
    key_by_difficulty: dict[str, Depths]
    correlations: dict[str, Estimate | None]
    wrong: float
    abstention: dict[str, Abstention]
    rules: dict[str, RuleRow | None]
    rules_items: int
    oracle_saved: float
    settled_saved: float


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
) -> GateReport:
    """Ask one question about each of n stories of the micro-world, every other one as chat.

    Args:
        model: A looped model.
        tokenizer: Its tokenizer; answers end in `<|im_end|>`.
        name: What the report calls the model.
        exit_config: The rule to look at; by default the checkpoint's own.
        n: Questions, at least 2.
        rules_n: The first of them, on which the rules are compared, at least 2.
        split: "train" or "test".
        seed: Seed of the stories.
        on_step: Told the steps done; there are 2 n and one for each rule.

    Raises:
        ValueError: On fewer than two questions, the calibration split, or a model without a gate.
    """
    if not model.has_gate:
        raise ValueError(f"{name!r} has no exit gate to look at: take one that has, or `bench stability` or `fidelity`")
    if not 2 <= rules_n <= n:
        raise ValueError(
            f"n {n!r} and rules_n {rules_n!r}: at least 2 questions, and no more for the rules than in all"
        )
    check_measured_split(split)
    config = model.resolve_exit_config(exit_config)
    rule = model.exit_rule(config)
    items = [draw(split, seed, index, questions=1).items[0] for index in range(n)]
    tokens = read_forced(model, tokenizer, {_RULE: rule}, items, on_step)
    doubts = read_doubts(model, tokenizer, rule, items, lambda done: on_step(n + done))
    rules = compare_rules(model, tokenizer, rules_n, split, seed, on_rule=lambda done: on_step(2 * n + done))
    difficulty = np.array([item.difficulty for item in items])
    hops = np.array([item.hops for item in items])
    answers, keys = tokens.where(tokens.is_answer), tokens.where(tokens.kind == KINDS.index("key"))
    by_kind = {kind: _depths(tokens.where(tokens.kind == number)) for number, kind in enumerate(KINDS)}
    return GateReport(
        model=name,
        rule=config.to_dict(),
        total_loops=model.num_loops,
        split=split,
        seed=seed,
        items=n,
        by_kind={**by_kind, "answers": _depths(answers), "all": _depths(tokens)},
        by_difficulty=_by_difficulty(answers, difficulty),
        key_by_difficulty=_by_difficulty(keys, difficulty),
        correlations={
            **_correlations("answer tokens", answers, difficulty, hops),
            **_correlations("keys", keys, difficulty, hops),
        },
        wrong=float(doubts.wrong.mean()),
        abstention={score: measure_abstention(values, doubts.wrong) for score, values in doubts.scores.items()},
        rules=rules,
        rules_items=rules_n,
        oracle_saved=_saved(doubts.oracle[:rules_n], model.num_loops),
        settled_saved=_saved(doubts.settled[:rules_n], model.num_loops),
    )


def _saved(depths: Sequence[Sequence[int]], total_loops: int) -> float:
    return 1 - float(np.mean([depth for answer in depths for depth in answer])) / total_loops


def _by_difficulty(tokens: Tokens, difficulty: Ints) -> dict[str, Depths]:
    found = difficulty[tokens.item]
    return {str(level): _depths(tokens.where(found == level)) for level in np.unique(found)}


def _depths(tokens: Tokens) -> Depths:
    return Depths(
        tokens=len(tokens.item),
        exit=float(tokens.exits[_RULE].mean()),
        oracle=float(tokens.oracle.mean()),
        settled=float(tokens.settled.mean()),
        agreement=agreement(tokens, _RULE),
    )


def _correlations(what: str, tokens: Tokens, difficulty: Ints, hops: Ints) -> dict[str, Estimate | None]:
    against = {
        "difficulty": difficulty[tokens.item],
        "hops": hops[tokens.item],
        "oracle": tokens.oracle,
        "settled oracle": tokens.settled,
    }
    exits = tokens.exits[_RULE]
    return {
        f"exit depth and {other}, {what}": _correlate(exits, value, tokens.item) for other, value in against.items()
    }


def _correlate(left: Ints, right: Ints, item: Ints) -> Estimate | None:
    order = np.argsort(item, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(item[order])) + 1)

    def rho(drawn: Ints) -> float | None:
        tokens = np.concatenate([members[index] for index in drawn])
        if np.ptp(left[tokens]) == 0 or np.ptp(right[tokens]) == 0:
            return None
        return float(spearmanr(left[tokens], right[tokens]).statistic)

    return bootstrap(rho, len(members), _RANK_RESAMPLES)
