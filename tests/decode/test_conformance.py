"""Runner x family x what follows an exit x K/V x batch: every cell against references that never skip or share.

A case is a random tiny model with a random rule, prompts of any lengths and ids that may end a text early. Greedy tokens,
depths, reasons, passes, rows and readings of the head are those of the slow references of `tests/reference.py` and
`tests/models/raven_reference.py`, in float64, row by row.
"""

import copy
import random
from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.config import KVConfig
from sigma0.decode.exits import REASON_WHEN_MET
from tests.decode.captures import WAYS, called_by
from tests.marks import named, needs_compiler
from tests.models.raven_reference import SHAPES, tiny_raven
from tests.models.raven_reference import Reference as RavenReference
from tests.reference import (
    DroppingReference,
    Step,
    VerifyingReference,
    finish_rows,
    run_all_loops,
    setting,
    settled_model,
    tiny_model,
    tiny_nanbeige,
)

NEAR_TIE = 1e-5
FULL = ExitConfig(mode="full")
AFTER = ("finish", "drop", "verify")
BATCH = 3
CASES = 4


def random_ouro(rng):
    heads = rng.choice([1, 2, 4, 6])
    return rng.choice([tiny_model, settled_model])(
        seed=rng.randrange(10**6),
        vocab_size=rng.randrange(11, 80),
        hidden_size=heads * 8,
        intermediate_size=rng.randrange(9, 70),
        num_hidden_layers=rng.randrange(1, 4),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([kv for kv in (1, 2, 3, 6) if heads % kv == 0]),
        total_ut_steps=rng.randrange(1, 7),
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e4, 1e6])},
    )


def random_nanbeige(rng):
    heads = rng.choice([1, 2, 4, 6])
    return tiny_nanbeige(
        seed=rng.randrange(10**6),
        hidden_size=rng.choice([16, 24, 32]),
        head_dim=rng.choice([6, 12, 16]),
        num_hidden_layers=rng.randrange(1, 4),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([kv for kv in (1, 2, 3) if heads % kv == 0]),
        num_loops=rng.randrange(1, 6),
        skip_loop_final_norm=rng.random() < 0.4,
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e4, 7e7])},
    )


# Start states of every kind, several loops a pass, rows of the vocabulary that belong to no token.
RAVENS = (
    {},
    *({"init_scale": 1.0, "initial_state_mode": mode} for mode in ("random", "embed-init", "skip-adapter")),
    {"mean_recurrence": 8, "stride": 2},
    {"padded_vocab_size": 64, "mean_recurrence": 6},
)


def random_raven(layout):
    return lambda rng: tiny_raven(layout, rng.randrange(10**6), **rng.choice(RAVENS))


FAMILIES = {
    "ouro": random_ouro,
    "nanbeige": random_nanbeige,
    **{f"raven-{layout}": random_raven(layout) for layout in SHAPES},
}


def random_rule(rng, model, after):
    modes = ["full", "fixed", "converge", "accel", "margin", "margin"]
    if hasattr(model, "transformer"):
        modes = ["full", "converge", "margin", "margin"]
    elif model.has_gate:
        modes += ["qexit"] * 3
    mode = rng.choice(modes)
    rule = setting(
        mode,
        q=rng.uniform(0.05, 1.0),
        eps=rng.uniform(0.2, 1.2),
        patience=rng.randrange(1, 3),
        theta=rng.choice([rng.uniform(0.02, 0.3), rng.uniform(0.05, 0.95)]),
        depth=rng.randrange(1, model.num_loops + 1) if mode == "fixed" else None,
        min_loops=rng.choice([1, 1, 2, 9]),
        accel_scale=rng.choice(["states", "steps"]),
        after_exit=after,
    )
    return replace(rule, redraft=rng.random() < 0.7)


class Row:
    """What is written behind a prompt: its tokens as steps, and what it costs; None where no reference counts it."""

    def __init__(self, case, prompt):
        model, config, new, ends = case.model, case.config, case.new, case.ends
        self.prompt, self.passes, self.rows, self.tail = prompt, None, None, None
        self.limit = config.depth if config.mode == "fixed" and config.after_exit != "verify" else model.num_loops
        if case.is_raven:
            self.steps = raven_steps(model, config, prompt, new)
        elif config.after_exit == "verify":
            reference = VerifyingReference(case.model64, config)
            self.steps = reference.generate(prompt, new, ends)
            self.passes, self.rows, self.tail = reference.passes, reference.rows, reference.tail
        elif config.after_exit == "drop":
            self.steps = DroppingReference(case.model64, config).generate(prompt, new)
        else:
            self.steps = run_all_loops(case.model64, prompt, config, new)
        ended = next((number for number, step in enumerate(self.steps, 1) if step.token in ends), len(self.steps))
        self.steps = self.steps[:ended]
        self.margin = min(step.margin for step in self.steps)
        depths = [step.depth for step in self.steps]
        if config.after_exit != "verify":
            self.passes = sum(depths[1:])
            self.rows = self.passes if config.after_exit == "drop" else finish_rows(depths, self.limit)
            if case.is_raven and config.after_exit == "drop":
                self.passes = self.rows = None

    @property
    def tokens(self):
        return [step.token for step in self.steps]


def raven_steps(model, config, prompt, new):
    """`finish` and the tokens of `verify`; nothing is known of the depths of drafts, nor of `drop`."""
    reference = RavenReference(model)
    if config.after_exit == "finish":
        threshold = {"margin": config.theta, "converge": config.eps}.get(config.mode, 0.0)
        out = reference.write(prompt, new, config.mode, threshold, config.min_loops)
    else:
        out = reference.full_depth(prompt, new)
    depths = out.depths if config.after_exit == "finish" else [None] * new
    steps = [Step(token, depth, None, out.margin) for token, depth in zip(out.tokens, depths, strict=True)]
    if config.after_exit == "drop":
        steps = [replace(step, token=None) for step in steps]
    return steps


class Case:
    def __init__(self, family, after, seed):
        self.is_raven = family.startswith("raven")
        for attempt in count():
            rng = random.Random(f"{family} {after} {seed} {attempt}")
            self.model = FAMILIES[family](rng)
            self.model64 = copy.deepcopy(self.model).double()
            self.config = random_rule(rng, self.model, after)
            vocabulary = self.model.config.vocab_size
            self.prompts = [[rng.randrange(1, vocabulary) for _ in range(rng.randrange(1, 12))] for _ in range(BATCH)]
            self.new = rng.randrange(2, 12)
            self.ends = frozenset(rng.sample(range(vocabulary), 3) if seed % 2 and not (self.is_raven and after == "drop") else ())
            self.rows = [Row(self, prompt) for prompt in self.prompts]
            if min(row.margin for row in self.rows) > NEAR_TIE:
                break


case_of = cache(Case)


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def written(model, rows, config, new, ends=(), **asked):
    ids, mask = padded(rows)
    settings = {"max_new_tokens": new, "do_sample": False, "exit_config": config, "return_dict_in_generate": True}
    settings |= {"eos_token_id": sorted(ends) or None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **settings | asked)


def check_way(way, out):
    chosen = out.runner
    assert (chosen.name, chosen.captured, chosen.late) == {
        "late": ("eager", False, True),
        "captured": ("cudagraph", True, True),
        "compile": ("compile", False, False),
    }.get(way, ("eager", False, False))


def check_cell(case, out, batch):
    rows, config, width = case.rows[:batch], case.config, out.sequences.shape[1] - out.exit_depths.shape[1]
    after, longest = config.after_exit, out.exit_depths.shape[1]
    assert longest == max(len(row.steps) for row in rows)
    for number, row in enumerate(rows):
        ended = len(row.steps)
        tokens, depths = out.sequences[number, width:].tolist(), out.exit_depths[number].tolist()
        assert tokens[ended:] == depths[ended:] == [0] * (longest - ended)
        for place, step in enumerate(row.steps):
            here = number, place
            assert step.token in (None, tokens[place]) and step.depth in (None, depths[place]), here
            if step.met is not None:
                met = "fixed" if config.mode in ("full", "fixed") else REASON_WHEN_MET[config.mode]
                expected = met if step.met or met == "fixed" else "max_depth"
                assert out.exit_reasons[number][place] == expected, here
                assert after != "verify" or bool(out.accepted[number, place]) == step.accepted, here
            if step.logits is not None and out.logits is not None:
                torch.testing.assert_close(out.logits[place][number].double(), step.logits, rtol=1e-3, atol=1e-3)
    spent = [sum(depths[1:]) for depths in out.exit_depths.tolist()]
    if after == "verify" and case.is_raven:
        # each token enters as soon as what is fed was first read, and the last is checked up to loop T
        total = case.model.num_loops
        spent = [
            sum(depths[1 : len(row.steps) - 1]) + total if len(row.steps) > 1 else 0
            for depths, row in zip(out.exit_depths.tolist(), rows, strict=True)
        ]
    assert out.loop_passes == max(spent if row.passes is None else row.passes for row, spent in zip(rows, spent))
    if rows[0].rows is not None:
        assert out.loop_rows == sum(row.rows for row in rows)
    if rows[0].tail is not None and batch == 1:
        assert out.tail_passes == rows[0].tail
    assert out.prompt_rows == rows[0].limit * sum(len(row.prompt) for row in rows)
    if after != "verify" and not case.is_raven:
        reads = sum(spent) if config.mode == "margin" else sum(len(row.steps) - 1 for row in rows)
        assert out.head_rows == reads


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_cell_is_its_reference(way, family, after, batch):
    if (way, after) == ("stock", "verify"):
        pytest.skip("a forward of a single token cannot take tokens back")
    for seed in range(CASES):
        case = case_of(family, after, seed)
        with named(seed, case.config), called_by(way, case.model) as (asked, made):
            asked["output_logits"] = way not in ("late", "captured")
            out = written(case.model, case.prompts[:batch], case.config, case.new, case.ends, **asked)
            if way == "stock":
                longest = max(len(row.steps) for row in case.rows[:batch])
                for row, tokens in zip(case.rows, out.sequences[:, -longest:].tolist()):
                    assert tokens[: len(row.steps)] == row.tokens
                continue
            check_way(way, out)
            check_cell(case, out, batch)
