"""Runner x family x what follows an exit x K/V x batch: every cell against references that never skip or share.

A case is a random tiny model with a random rule, prompts of any lengths and ids that may end a text early. Greedy
tokens, depths, reasons, passes, rows, logits and readings of the head are those of the slow references of
`tests/reference.py` and `tests/models/raven_reference.py`, in float64, row by row.
"""

import copy
import random
from dataclasses import replace
from functools import cache
from itertools import count, product

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.exits import REASON_WHEN_MET, ScriptedExits
from tests.decode.captures import WAYS, called_by
from tests.marks import exhaustive, fast_if, named, needs_compiler, slow
from tests.models.raven_reference import SHAPES, tiny_raven
from tests.models.raven_reference import Reference as RavenReference
from tests.reference import (
    DroppingReference,
    Step,
    VerifyingReference,
    finish_rows,
    gap,
    run_all_loops,
    setting,
    settled_model,
    tiny_model,
    tiny_nanbeige,
)

NEAR_TIE = 1e-5
FULL = ExitConfig(mode="full")
AFTER = ("finish", "drop", "verify")
# Of the ways, those that take seconds.
TRACED = ("captured", "compile")
BATCH = 3
CASES = 4


def random_ouro(rng):
    heads = rng.choice([1, 2, 4, 6])
    return rng.choice([tiny_model, settled_model, settled_model])(
        seed=rng.randrange(10**6),
        vocab_size=rng.randrange(11, 80),
        hidden_size=heads * 8,
        intermediate_size=rng.randrange(9, 70),
        num_hidden_layers=rng.randrange(1, 4),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([kv for kv in (1, 2, 3, 6) if heads % kv == 0]),
        total_ut_steps=rng.choice([1, 3, 4, 5, 6]),
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


def random_rule(rng, model, after, seed):
    """Of every four cases one is of `margin`, one of the gate or `converge`, one of `accel`, and one of any rule."""
    modes = ["margin", "qexit" if model.has_gate else "converge", "accel", "full", "fixed", "converge"]
    if hasattr(model, "transformer"):
        modes = ["margin", "converge", "full"]
    mode = modes[seed % 4] if seed % 4 < min(3, len(modes) - 1) else rng.choice(modes)
    rule = setting(
        mode,
        q=rng.uniform(0.05, 1.0),
        eps=rng.uniform(0.2, 1.2),
        patience=rng.randrange(1, 3),
        theta=rng.choice([rng.uniform(0.02, 0.3), rng.uniform(0.05, 0.95)]),
        depth=rng.randrange(1, model.num_loops + 1) if mode == "fixed" else None,
        min_loops=rng.choice([1, 1, 1, 2, 9]),
        accel_scale=rng.choice(["states", "steps"]),
        after_exit=after,
    )
    return replace(rule, redraft=seed % 2 == 0)


class Row:
    """What is written after a prompt, as steps, and what that takes; None of what no reference counts."""

    def __init__(self, case, prompt):
        self.case, self.prompt, self.config = case, prompt, case.config
        model, config, new = case.model, case.config, case.new
        self.limit = config.depth if config.mode == "fixed" and config.after_exit != "verify" else model.num_loops
        if case.is_raven:
            self.written = raven_steps(model, config, prompt, new)
        elif config.after_exit == "verify":
            self.reference = VerifyingReference(case.model64, config)
            self.written = self.reference.generate(prompt, new)
        elif config.after_exit == "drop":
            self.written = DroppingReference(case.model64, config).generate(prompt, new)
        else:
            self.written = run_all_loops(case.model64, prompt, config, new)
        self.margin = self.written[-1].margin if case.is_raven else min(step.margin for step in self.written)

    def end(self, ends):
        """Ends the text at the first of these ids."""
        ended = next((number for number, step in enumerate(self.written, 1) if step.token in ends), self.case.new)
        self.steps, after = self.written[:ended], self.config.after_exit
        self.tokens, depths = [[getattr(step, name) for step in self.steps] for name in ("token", "depth")]
        self.rows = self.tail = None
        self.passes = sum(depths[1:])
        if after != "verify":
            self.rows = self.passes if after == "drop" else finish_rows(depths, self.limit)
        elif self.case.is_raven:
            # each token enters as soon as the last one was read as it stays, and the last is checked up to loop T
            self.passes = sum(depths[1 : ended - 1]) + self.limit * (ended > 1)
        else:
            # drafts of ends are waited for
            self.steps, reference = self.reference.generate(self.prompt, self.case.new, ends), self.reference
            self.passes, self.rows, self.tail = reference.passes, reference.rows, reference.tail


def raven_steps(model, config, prompt, new):
    """No reference knows how deep drafts are read, nor what `drop` writes: there rows alone are the reference."""
    reference = RavenReference(model)
    if config.after_exit == "finish":
        threshold = {"margin": config.theta, "converge": config.eps}.get(config.mode, 0.0)
        out = reference.write(prompt, new, config.mode, threshold, config.min_loops)
        depths, tokens, margin = out.depths, out.tokens, out.margin
    else:
        alone = written(model, [prompt], config, new, output_logits=True)
        depths, tokens = alone.exit_depths[0].tolist(), alone.sequences[0, len(prompt) :].tolist()
        margin = min(gap(logits[0]) for logits in alone.logits)
        if config.after_exit == "verify":
            full = reference.full_depth(prompt, new)
            tokens, margin = full.tokens, min(full.margin, margin)
    met = [depth < model.num_loops or None for depth in depths]
    return [Step(*step, margin) for step in zip(tokens, depths, met, strict=True)]


class Case:
    """Prompts after a rule that is drawn, of a model that is drawn as well where none is given."""

    def __init__(self, family, after, seed, model=None):
        self.is_raven = family.startswith("raven")
        for attempt in count():
            rng = random.Random(f"{family} {after} {seed} {attempt}")
            self.model = model or FAMILIES[family](rng)
            self.model64 = copy.deepcopy(self.model).double()
            self.config = random_rule(rng, self.model, after, seed)
            vocabulary = self.model.config.vocab_size
            self.prompts = [[rng.randrange(1, vocabulary) for _ in range(rng.randrange(1, 12))] for _ in range(BATCH)]
            self.new = rng.randrange(3, 12)
            self.rows = [Row(self, prompt) for prompt in self.prompts]
            # an odd case has an end that one text comes to before another
            self.ends = frozenset(rng.sample([step.token for step in self.rows[0].written[:-1]], seed % 2))
            for row in self.rows:
                row.end(self.ends)
            if min(row.margin for row in self.rows) > NEAR_TIE and self.is_worth_running(
                any_case=attempt > (1 if model else 4 if self.is_raven else 20) or seed % 4 == 3
            ):
                break

    def is_worth_running(self, any_case):
        """Some texts end before others where they can; some tokens leave early, and some drafts fall."""
        steps = [step for row in self.rows for step in row.steps]
        early = any(step.depth < self.model.num_loops for step in steps)
        falls = self.config.after_exit != "verify" or self.is_raven or not all(step.accepted for step in steps)
        apart = not self.ends or len({len(row.steps) for row in self.rows}) > 1
        return any_case or (apart and early and falls)


case_of = cache(Case)


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def written(model, rows, config, new, ends=(), **asked):
    ids, mask = padded(rows)
    settings = {"max_new_tokens": new, "do_sample": False, "exit_config": config, "return_dict_in_generate": True}
    settings |= {"eos_token_id": sorted(ends) or None, "pad_token_id": 0, "attention_mask": mask}
    return model.generate(ids, **settings | asked)


def check_way(way, out, made):
    if out.runner is None:
        assert way == "python" and len(out.sequences) > 1, "rows of one length go together"
        return
    chosen = out.runner
    assert (chosen.name, chosen.captured, chosen.late) == {
        "late": ("eager", False, True),
        "captured": ("cudagraph", True, True),
        "compile": ("compile", False, False),
    }.get(way, ("eager", False, False))
    assert way != "captured" or made[0].replays >= out.loop_passes


def check_cell(case, out, batch):
    rows, config, width = case.rows[:batch], case.config, out.sequences.shape[1] - out.exit_depths.shape[1]
    after, longest = config.after_exit, out.exit_depths.shape[1]
    assert longest == max(len(row.steps) for row in rows)
    for number, row in enumerate(rows):
        ended = len(row.steps)
        assert len(out.exit_reasons[number]) == ended
        tokens, depths = out.sequences[number, width:].tolist(), out.exit_depths[number].tolist()
        assert tokens[ended:] == depths[ended:] == [0] * (longest - ended)
        assert after != "verify" or not out.accepted[number, ended:].any()
        for place, step in enumerate(row.steps):
            here = number, place
            assert (tokens[place], depths[place]) == (step.token, step.depth), here
            if step.met is not None:
                met = "fixed" if config.mode in ("full", "fixed") else REASON_WHEN_MET[config.mode]
                expected = met if step.met or met == "fixed" else "max_depth"
                assert out.exit_reasons[number][place] == expected, here
                assert after != "verify" or bool(out.accepted[number, place]) == step.accepted, here
            if step.logits is not None and out.logits is not None:
                torch.testing.assert_close(out.logits[place][number].double(), step.logits, rtol=1e-3, atol=1e-3)
    if out.runner is None:
        return
    assert out.loop_passes == max(row.passes for row in rows)
    if rows[0].rows is not None:
        assert out.loop_rows == sum(row.rows for row in rows)
    if rows[0].tail is not None and batch == 1:
        assert out.tail_passes == rows[0].tail
    assert out.prompt_rows == rows[0].limit * sum(len(row.prompt) for row in rows)
    if after != "verify" and not case.is_raven:
        reads = sum(row.passes if config.mode == "margin" else len(row.steps) - 1 for row in rows)
        assert out.head_rows == reads


def check_case(way, family, after, batch, seed):
    case = case_of(family, after, seed)
    with named(seed, case.config), called_by(way, case.model) as (asked, made):
        # what is kept of logits has to be seen before the next step
        asked["output_logits"] = way not in ("late", "captured")
        out = written(case.model, case.prompts[:batch], case.config, case.new, case.ends, **asked)
        if way != "stock":
            check_way(way, out, made)
            check_cell(case, out, batch)
            return
        longest = max(len(row.steps) for row in case.rows[:batch])
        for row, tokens in zip(case.rows[:batch], out.sequences[:, -longest:].tolist(), strict=True):
            assert tokens[: len(row.steps)] == row.tokens


def cell(way, family, after, batch):
    """A cell, by what it costs: a step that is captured is called three times over, a graph is traced in a second."""
    values = way, family, after, batch
    if way in TRACED:
        if family == "ouro" and batch == BATCH:
            return fast_if(way == "captured" or after == "finish", *values)
        return (slow if batch == BATCH and family in ("nanbeige", "raven-post") else exhaustive)(*values)
    # of the other families one after the other
    turn = tuple(FAMILIES)[2 + AFTER.index(after)] if way in ("eager", "late") else "nanbeige"
    return fast_if(family == "ouro" or (batch == BATCH and family == turn), *values)


@pytest.mark.cpu(8)
@needs_compiler
@pytest.mark.parametrize(
    ("way", "family", "after", "batch"),
    [cell(*values) for values in product(WAYS, FAMILIES, AFTER, (1, BATCH)) if values[::2] != ("stock", "verify")],
)
def test_a_cell_is_its_reference(way, family, after, batch):
    for seed in [AFTER.index(after)] if way in TRACED else range(CASES if family == "ouro" else 2):
        check_case(way, family, after, batch, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in TRACED])
def test_many_cases_are_their_references(way, family, after):
    for seed in range(CASES, 40 * (way != "stock" or after != "verify")):
        check_case(way, family, after, 1 + seed % BATCH, seed)


@pytest.mark.cpu(8)
@needs_compiler
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("way", [fast_if(way != "compile", way) for way in WAYS])
def test_a_later_turn_is_its_reference(way, after):
    """Of texts that ended apart: what was not run as yet, the last token of each, is run before what follows it."""
    if (way, after) == ("stock", "verify"):
        pytest.skip("a forward of a single token cannot take tokens back")
    for family, seed in (("ouro", 1), ("nanbeige", 1), ("ouro", 3))[: 1 if way in TRACED else 2]:
        case = case_of(family, after, seed)
        with named(family, case.config), called_by(way, case.model) as (asked, _):
            first = written(case.model, case.prompts, case.config, case.new, case.ends, **asked)
            longest = max(len(row.steps) for row in case.rows)
            _, mask = padded(case.prompts)
            # a mask may hide the id that ended a text
            hidden = [int(seed == 3 and len(row.steps) < longest) for row in case.rows]
            lengths = [len(row.steps) - hides for row, hides in zip(case.rows, hidden, strict=True)]
            live = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
            more = torch.tensor([[7, 3], [5, 5], [2, 9]])
            again = case.model.generate(
                torch.cat([first.sequences, more], 1), attention_mask=torch.cat([mask, live, torch.ones_like(more)], 1),
                past_key_values=first.past_key_values, max_new_tokens=5, do_sample=False, exit_config=case.config,
                return_dict_in_generate=True, eos_token_id=None, **asked,
            )  # fmt: skip
            for number, row in enumerate(case.rows):
                text = [*row.prompt, *row.tokens[: lengths[number]], *more[number].tolist()]
                if after == "drop":
                    reference = DroppingReference(case.model64, case.config)
                    reference.generate(row.prompt, len(row.steps))
                    steps = reference.generate(text[len(reference.exits) :], 5)
                elif after == "verify":
                    steps = VerifyingReference(case.model64, case.config).generate(text, 5)
                else:
                    steps = run_all_loops(case.model64, text, case.config, 5)
                assert min(step.margin for step in steps) > NEAR_TIE
                assert again.sequences[number, -5:].tolist() == [step.token for step in steps]
                if way != "stock":
                    assert again.exit_depths[number].tolist() == [step.depth for step in steps]


@pytest.mark.cpu(8)
@needs_compiler
@pytest.mark.parametrize("family", ["ouro", exhaustive("raven-pre")])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(
    "way", [fast_if(way != "compile", way) for way in WAYS if way not in ("eager", "python", "stock")]
)
def test_draws_and_statistics_are_those_of_eager_steps(way, after, family):
    """Draws are hashes of seed, position and purpose: a sequence draws the same in every way, alone and in company."""
    draws = {"do_sample": True, "temperature": 1.5, "top_k": 20, "output_statistics": way != "late"}
    for seed in (0, 2)[: 1 if way in TRACED else 2]:
        case, result = case_of(family, after, seed), []
        for name, batch in (("eager", 1), ("eager", BATCH), (way, BATCH)):
            with named(seed, name, case.config), called_by(name, case.model) as (asked, _):
                torch.manual_seed(5)
                result.append(written(case.model, case.prompts[:batch], case.config, 9, **asked | draws))
        alone, eager, out = result
        assert out.sequences.equal(eager.sequences) and out.exit_depths.equal(eager.exit_depths)
        # the seeds of a batch come from one call, the first sequence's first
        assert alone.sequences[0, -9:].equal(out.sequences[0, -9:])
        assert out.exit_reasons == eager.exit_reasons
        if draws["output_statistics"]:
            # angles of steps that hardly turn hang on the last bits of states, and more where they are small
            for name, atol in (("loop_statistics", 5e-3), ("readings", 1e-3), ("deepest_readings", 1e-3)):
                torch.testing.assert_close(
                    getattr(out, name), getattr(eager, name), rtol=1e-3, atol=atol, equal_nan=True
                )
            assert out.loop_fates.equal(eager.loop_fates)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("way", ["eager", "late", slow("torch"), slow("captured"), exhaustive("compile")])
def test_a_run_that_is_closed_early_leaves_nothing_that_was_not_told(way, after):
    """With a step under way, whose tokens nobody has seen: the cache goes on as if it had never been launched."""
    for seed, prompt in ((1, [9, 10, 11]), (2, [5, 6])):
        model, config = settled_model(seed, total_ut_steps=4), ExitConfig(q=0.4, after_exit=after)
        with called_by(way, model) as (asked, _):
            loop, first = written(model, [prompt], config, 40, custom_generate=type(model).open_token_loop, **asked)
            output, run = [], loop.run(first)
            while len(output) < 5:
                output += [(item.token_id, item.depth) for item in next(run)]
            run.close()
            text = [*prompt, *(token for token, _ in output)]
            assert loop.sequences[0].tolist() == text and loop.cache.length == len(text) - 1
            logits = model(torch.tensor([text[-1:]]), past_key_values=loop.cache, exit_config=FULL).logits[0, -1]
        model64, count = copy.deepcopy(model).double(), len(output)
        expected = run_all_loops(model64, text, FULL, 1)[0].logits
        if after == "finish":
            steps = run_all_loops(model64, prompt, config, count)
        elif after == "verify":
            steps = VerifyingReference(model64, config).generate(prompt, 40)[:count]
        else:
            reference = DroppingReference(model64, config)
            steps = reference.generate(prompt, count)
            reference.read(text[-1], prompt=True)
            expected = reference.logits
        assert output == [(step.token, step.depth) for step in steps]
        torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("after", [*AFTER, "verify-once"])
@pytest.mark.parametrize("way", ["eager", "torch", "late", slow("captured"), exhaustive("compile")])
def test_a_given_course_is_followed(way, after, monkeypatch):
    """Exits that are given beforehand, and loops from which on drafts stand: the last pass of each token is known."""
    model, exits, settled = tiny_model(3, total_ut_steps=4), (1, 3, 2, 1, 4), (2, 1, 4, 1, 1)
    config = replace(ExitConfig(q=0.5, after_exit=after.removesuffix("-once")), redraft=after == "verify")
    rule = model.exit_rule(config)
    rule.script = ScriptedExits(exits, settled if "verify" in after else (), stride=1)
    monkeypatch.setattr(model, "exit_rule", lambda config: rule)
    with called_by(way, model) as (asked, _):
        out = written(model, [[5, 6, 7], [8, 9]], config, 10, **asked)
    for sequence in range(2):
        depths = []
        for place in range(9):
            leaves, stands = (item[(place + sequence) % 5] for item in (exits, settled))
            fallen = "verify" in after and leaves < stands
            depths.append((stands if after == "verify" else 4) if fallen else leaves)
        assert out.exit_depths[sequence, 1:].tolist() == depths
