"""A step as one call: the lines and the state of the eager runner's, and nothing of it is looked at on the host."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList

from sigma0 import ExitConfig
from sigma0.decode import runner as runner_module
from sigma0.decode import runners
from sigma0.decode.lanes import STAGE
from sigma0.decode.ops import depth_attention_reference
from sigma0.decode.programs import tensors_of
from sigma0.decode.python_hooks import sampler_of
from sigma0.decode.repetition import CollapseStop
from sigma0.decode.runner import LateRunner
from sigma0.decode.runners import choose_runner
from sigma0.decode.sampling_params import SamplingSettings, SequenceSampling
from sigma0.decode.settings import SequenceExit
from sigma0.decode.step import EMITTED, ENDS, FRESH, SEQUENCE, whole_step
from sigma0.decode.transfer import Landing
from tests.decode.test_wave_against_reference import generate, padded, random_config, random_model, random_prompts
from tests.marks import needs_compiler
from tests.reference import tiny_model

LONGEST = 64
# What makes the host wait for a device, or gives a shape that only the device knows.
LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.default")


@pytest.fixture
def late_on_cpu(monkeypatch):
    monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({"cpu"}))


def opened(model, prompts, config, new=LONGEST, **settings):
    ids, mask = padded(prompts)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        exit_config=config,
        custom_generate=type(model).open_token_loop,
        **{"do_sample": False, **settings},
    )


def mixed(rng, model, batch, draws, afters=("finish", "verify", "drop")):
    """A token loop of sequences that share no setting, before its first pass."""
    total = model.num_loops
    prompts = [[rng.randrange(1, model.config.vocab_size) for _ in range(rng.randrange(1, 6))] for _ in range(batch)]
    loop, first = opened(model, prompts, ExitConfig(mode="full"))
    loop._begin(first)
    runner = loop.runner
    for sequence in range(batch):
        after = rng.choice(afters)
        config = random_config(rng, after, total)
        rule = model.exit_rule(config)
        wanted = SequenceExit(rule, after == "drop", after == "verify", loop.first_position)
        runner.settings.set_exit([sequence], wanted)
        eos = [rng.randrange(model.config.vocab_size) for _ in range(rng.randrange(3))]
        runner.settings.set_ends([sequence], eos, loop.first_position + rng.randrange(2, 12))
    if draws:
        settings = SamplingSettings(batch, torch.device("cpu"))
        each = [
            SequenceSampling(draws=rng.random() < 0.7, seed=rng.randrange(99), top_k=rng.choice([0, 5]))
            for _ in range(batch)
        ]
        settings.set(0, *each)
        loop.choice = sampler_of(loop, settings)
        runner.lanes.remember_probs(model.config.vocab_size)
    runner.use(runner.settings.program())
    loop.cache.reserve_positions(LONGEST)
    loop.cache.extend(LONGEST)
    return loop


def eager_lines(loop):
    """The lines of a step by the eager runner, which then suspends what has ended."""
    runner = loop.runner
    step = runner.loop(LONGEST)
    assert step is not None
    which = runner.to_read(step[1])
    lines = runner.settle(*step, which, loop.choice)[0].tolist() if len(which) else []
    runner.lanes.suspend([line[SEQUENCE] for line in lines if line[EMITTED] and line[ENDS]])
    return lines


def meaningful(lines):
    return sorted(line for line in lines if line[EMITTED] or line[FRESH])


def assert_same_state(ours, theirs):
    """Two loops' lanes and planes; what is nobody's may hold anything."""
    lanes, others = ours.runner.lanes, theirs.runner.lanes
    assert torch.equal(lanes.table[:-1], others.table[:-1])
    stage = lanes.table[:-1, STAGE]
    close = {"rtol": 1e-9, "atol": 1e-11}
    held = stage != lanes.idle
    torch.testing.assert_close(lanes.hidden[:-1][held], others.hidden[:-1][held], **close)
    decodes, live = stage < lanes.depth, stage < lanes.idle
    for name in ("gate", "exit_state", "probs"):
        own, other = getattr(lanes, name), getattr(others, name)
        assert (own is None) == (other is None)
        where = decodes if name == "gate" else live & (stage >= lanes.depth) if name == "probs" else live
        for left, right in zip(tensors_of(own), tensors_of(other), strict=True):
            rows = [part[:-1][where].double() for part in (left, right)]
            torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-6)
    for layer, other_layer in zip(ours.cache.planes, theirs.cache.planes, strict=True):
        for left, right in ((layer.flat_keys, other_layer.flat_keys), (layer.flat_values, other_layer.flat_values)):
            torch.testing.assert_close(left[:, :-1], right[:, :-1], **close)


@pytest.mark.grid(fast=2, slow=2)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_lines_and_state_are_the_eager_runners(batch, draws, monkeypatch):
    rng = random.Random(f"{batch} {draws} False")
    emitted = 0
    for case in range(4 if batch == 1 else 2):
        model = random_model(rng).double()
        monkeypatch.setenv("SIGMA0_INNER_BREAK", str(case % 2))
        seed = rng.random()
        eager, whole = (mixed(random.Random(seed), model, batch, draws) for _ in range(2))
        while (live := eager.runner.live()[0]) and emitted < 10**4:
            expected = eager_lines(eager)
            count = rng.randrange(live, whole.runner.lanes.count + 1)
            with torch.no_grad():
                lines = whole_step(whole.runner.batch(LONGEST), count, whole.choice, suspends=True)[0].tolist()
            assert meaningful(lines[:-1]) == meaningful(expected)
            assert_same_state(whole, eager)
            assert lines[-1][0] == live and lines[-1][3] == eager.runner.live()[0]
            emitted += len(meaningful(expected))
    assert emitted > 15


def outcome(outputs):
    counts = (outputs.loop_passes, outputs.loop_rows, outputs.head_rows, outputs.tail_passes)
    return outputs.sequences.tolist(), outputs.exit_depths.tolist(), outputs.exit_reasons, counts


@pytest.mark.grid(fast=2, slow=2)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_tokens_depths_reasons_and_counts_are_the_eager_runners(after_exit, draws, monkeypatch):
    rng = random.Random(f"late {after_exit} {draws}")
    ended = 0
    for _ in range(12):
        model = random_model(rng).double()
        config = random_config(rng, after_exit, model.num_loops)
        prompts, new = random_prompts(rng, model.config.vocab_size), rng.randrange(1, 14)
        settings = {"eos_token_id": [rng.randrange(model.config.vocab_size) for _ in range(3)], "pad_token_id": 0}
        found = []
        for device in ("cuda", "cpu"):
            monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({device}))
            if draws:
                ids, mask = padded(prompts)
                torch.manual_seed(3)
                outputs = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=new,
                    do_sample=True,
                    top_k=5,
                    exit_config=config,
                    return_dict_in_generate=True,
                    **settings,
                )
            else:
                outputs = generate(model, prompts, config, new, **settings)
            found.append(outputs)
        assert [outputs.runner.late for outputs in found] == [False, True]
        assert outcome(found[1]) == outcome(found[0]), config
        ended += bool((found[0].exit_depths == 0).any())
    assert ended, "no sequence has ended before another"


@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_a_later_turn_continues_what_the_late_runner_left(after_exit, monkeypatch):
    rng = random.Random(f"turns {after_exit}")
    for _ in range(6):
        model = random_model(rng).double()
        config = random_config(rng, after_exit, model.num_loops)
        prompts = [[rng.randrange(1, model.config.vocab_size) for _ in range(4)] for _ in range(2)]
        found = []
        for device in ("cuda", "cpu"):
            monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({device}))
            first = generate(model, prompts, config)
            whole = [*first.sequences.tolist()]
            found.append(generate(model, whole, config, past_key_values=first.past_key_values))
        assert outcome(found[1]) == outcome(found[0]), config


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_what_the_host_alone_decides_comes_late_and_leaves_nothing_behind(after_exit, monkeypatch):
    """A run that is closed early, with a step under way, leaves the cache as if that had never been launched."""
    for seed in range(8):
        model = tiny_model(seed=seed, total_ut_steps=4).double()
        config = ExitConfig(q=0.4, after_exit=after_exit)
        prompts = [[5, 6, 7], [8, 9]]
        left = []
        for device in ("cuda", "cpu"):
            monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({device}))
            loop, first = opened(model, prompts, config)
            run = loop.run(first)
            told: list[list[tuple[int, int]]] = [[], []]
            while max(map(len, told)) < 5:
                for each in next(run):
                    told[each.sequence].append((each.token_id, each.depth))
            run.close()
            assert loop.cache.length == int(loop.cache_positions.max())
            assert [len(ids) for ids in loop.new_ids] == [len(ids) for ids in told]
            cache = loop.cache
            with torch.no_grad():
                ids = loop.sequences[:, cache.length + loop.shift :]
                logits = model(ids, past_key_values=cache, exit_config=ExitConfig(mode="full")).logits
            left.append((told, logits))
        assert left[0][0] == left[1][0]
        torch.testing.assert_close(left[0][1], left[1][1])


@pytest.mark.slow
def test_a_sequence_that_repeats_itself_is_ended_a_step_late(monkeypatch):
    alone = 0
    for seed in range(6):
        model = tiny_model(seed=seed, vocab_size=6, total_ut_steps=3).double()
        written = []
        for device in ("cuda", "cpu"):
            monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({device}))
            loop, first = opened(model, [[1, 2, 3], [4, 4], [5], [3, 1]], ExitConfig(q=0.2), new=48)
            loop.collapse = CollapseStop()
            tokens: list[list[tuple[int, int, bool]]] = [[] for _ in range(4)]
            for emissions in loop.run(first):
                for each in emissions:
                    assert not tokens[each.sequence] or not tokens[each.sequence][-1][2]
                    tokens[each.sequence].append((each.token_id, each.depth, each.last))
            written.append((tokens, loop.collapsed, loop.sequences.tolist(), loop.cache.length))
        assert written[0] == written[1]
        ends = [len(each) for each in written[0][0]]
        alone += any(ends[sequence] < max(ends) for sequence in written[0][1])
    assert alone, "no sequence was ended before another"


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_with_an_attention_that_picks_planes_up_to_a_bound(after_exit, monkeypatch):
    """As on a device, where nothing but the bound says how far rows may see, here as tight as it may be."""
    rng = random.Random(f"bound {after_exit}")
    monkeypatch.setattr(runner_module, "_BOUND", 1)
    for _ in range(4):
        model = random_model(rng).double()
        ops = replace(model.operations, depth_attention=depth_attention_reference)
        monkeypatch.setattr(type(model), "operations", property(lambda self, ops=ops: ops))
        config = random_config(rng, after_exit, model.num_loops)
        prompts = random_prompts(rng, model.config.vocab_size)
        found = []
        for device in ("cuda", "cpu"):
            monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({device}))
            first = generate(model, prompts, config)
            found.append(outcome(first))
            if after_exit != "verify":
                # what left is read by what comes later
                _, mask = padded(prompts)
                mask = torch.cat([mask, torch.ones(len(prompts), 10, dtype=mask.dtype)], 1)
                whole = torch.cat([first.sequences, first.sequences[:, -2:]], 1)
                again = model.generate(
                    whole,
                    attention_mask=mask,
                    past_key_values=first.past_key_values,
                    max_new_tokens=4,
                    do_sample=False,
                    exit_config=config,
                    return_dict_in_generate=True,
                )
                found[-1] += outcome(again)
        assert found[1] == found[0], config


class Counted(TorchDispatchMode):
    """What is called, by name; a boolean tensor as an index is told apart."""

    def __init__(self):
        super().__init__()
        self.looks = []
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        name = str(func)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        if any(look in name for look in LOOKS) or any(
            index is not None and index.dtype == torch.bool for index in indices
        ):
            self.looks.append(name)
        return func(*args, **(kwargs or {}))


def refuse(*_):
    raise AssertionError("a value was looked at")


@needs_compiler
@pytest.mark.parametrize("draws", [False, True])
def test_nothing_is_looked_at_in_a_step(draws, monkeypatch):
    rng = random.Random(5)
    for _ in range(4):
        loop = mixed(rng, random_model(rng), 4, draws)
        batch = loop.runner.batch(LONGEST)
        # what the operator does inside on a CPU is its own business
        monkeypatch.setattr(torch.ops.sigma0, "attend_rows", lambda k, v, f, query, *rest: torch.zeros_like(query))
        for _ in range(6):
            with Counted() as counted, monkeypatch.context() as patch, torch.no_grad():
                for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
                    patch.setattr(torch.Tensor, name, refuse)
                whole_step(batch, loop.runner.lanes.count, loop.choice)
            assert counted.calls > 20 and not counted.looks, counted.looks


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_a_whole_run_is_looked_at_through_one_door(after_exit, late_on_cpu, monkeypatch):
    """From the first token to the last, and as the run is closed: `np.asarray`, as `Landing` and `to_host` do it."""
    model = tiny_model(seed=2, total_ut_steps=4)
    ops = replace(model.operations, depth_attention=depth_attention_reference)
    monkeypatch.setattr(type(model), "operations", property(lambda self: ops))
    loop, first = opened(model, [[5, 6, 7], [8, 9]], ExitConfig(q=0.4, after_exit=after_exit), new=9)
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        emitted = [emission for emissions in loop.run(first) for emission in emissions]
    assert loop.runner.chosen.late and len(emitted) == 18


def test_the_count_of_looks_can_fail():
    with Counted() as counted:
        values = torch.arange(3)
        values[values > 1]
        values.sum().item()
    assert len(counted.looks) >= 2


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_one_copy_a_pass_and_state_that_stays_in_place(after_exit, late_on_cpu, monkeypatch):
    copies = []

    class Seen(Landing):
        def __init__(self, tensor):
            copies.append(tensor.shape)
            super().__init__(tensor)

    monkeypatch.setattr(runner_module, "Landing", Seen)
    model = tiny_model(seed=1, total_ut_steps=4)
    loop, first = opened(model, [[5, 6, 7], [8, 9]], ExitConfig(q=0.4, after_exit=after_exit), new=120)
    assert isinstance(loop.runner, LateRunner)
    run = loop.run(first)
    next(run)
    next(run)
    stages = loop.runner.lanes.stages
    monkeypatch.setattr(loop.runner.lanes, "stages", refuse)

    def places():
        parts = [loop.runner.lanes, loop.runner.settings, *loop.cache.planes]
        return [tensor.data_ptr() for tensor in tensors_of(parts)]

    before, passes = places(), loop.cache.counts.passes
    while loop.cache.counts.passes < passes + 100:
        next(run)
    assert places() == before
    # of each pass that was read, and of those under way
    assert len(copies) == loop.cache.counts.passes + loop.runner.lag
    monkeypatch.setattr(loop.runner.lanes, "stages", stages)
    run.close()


def test_a_step_is_launched_before_the_last_one_is_read(late_on_cpu, monkeypatch):
    order = []

    class Seen(Landing):
        def __init__(self, tensor):
            self.number = sum(kind == "launch" for kind, _ in order)
            order.append(("launch", self.number))
            super().__init__(tensor)

        def array(self):
            order.append(("read", self.number))
            return super().array()

    monkeypatch.setattr(runner_module, "Landing", Seen)
    outputs = generate(tiny_model(seed=1), [[5, 6, 7]], ExitConfig(q=0.4))
    assert outputs.loop_passes > 3
    at = {event: place for place, event in enumerate(order)}
    read = [number for kind, number in order if kind == "read"]
    assert read == list(range(outputs.loop_passes))
    assert all(at["launch", number + 1] < at["read", number] for number in read[:-1])
    assert all(at["launch", number + 2] > at["read", number] for number in read if ("launch", number + 2) in at)


def test_lanes_are_shown_as_they_are_behind_the_step_that_is_read(late_on_cpu):
    model = tiny_model(seed=1)
    loop, first = opened(model, [[5, 6, 7], [9, 4], [8]], ExitConfig(q=0.4))
    loop._begin(first)
    loop.cache.reserve_positions(LONGEST)
    loop.cache.extend(LONGEST)
    runner, launch, tables = loop.runner, loop.runner._launch, []
    runner.shows_lanes = True

    def noted(*arguments):
        told = launch(*arguments)
        tables.append(runner.lanes.table[:-1].tolist())
        return told

    runner._launch = noted
    for number in range(8):
        step = runner.step(LONGEST, loop.choice)
        assert step.table.tolist() == tables[number] and len(tables) == number + 1 + runner.lag
    runner.shows_lanes = False
    runner.forget()


def test_what_has_to_be_seen_keeps_the_eager_runner(late_on_cpu):
    model, config = tiny_model(seed=1), ExitConfig(q=0.4)
    plain = generate(model, [[5, 6]], config).runner
    assert plain.late and plain.name == "eager" and plain.reason == "what auto takes"
    assert generate(model, [[5, 6]], config, runner="eager").runner.late
    python = generate(model, [[5, 6]], config, logits_processor=LogitsProcessorList([lambda ids, scores: scores]))
    assert not python.runner.late and "only Python knows" in python.runner.reason
    penalised = generate(model, [[5, 6]], config, repetition_penalty=1.3)
    assert not penalised.runner.late and "only Python knows" in penalised.runner.reason
    statistics = generate(model, [[5, 6]], config, output_statistics=True)
    assert not statistics.runner.late and "statistics" in statistics.runner.reason


def test_a_cpu_is_never_late_by_itself():
    assert not choose_runner("auto", tiny_model(seed=1)).late
    assert not choose_runner("eager", tiny_model(seed=1)).late


@pytest.mark.grid(fast=0, slow=1)
@needs_compiler
@pytest.mark.parametrize("after_exit", ["finish", "verify"])
def test_a_step_is_one_graph(after_exit):
    model = tiny_model(seed=1, num_hidden_layers=1)
    loops = [mixed(random.Random(3), model, 2, True, afters=(after_exit,)) for _ in range(2)]
    for loop in loops:
        loop.runner.model.reserve_positions(LONGEST, loop.runner.lanes.hidden)
    eager, compiled = loops
    batch, count = compiled.runner.batch(LONGEST), compiled.runner.lanes.count
    whole = torch.compile(
        lambda: whole_step(batch, count, compiled.choice)[0], fullgraph=True, dynamic=False, backend="aot_eager"
    )
    for _ in range(4):
        with torch.no_grad():
            lines = whole().tolist()
            assert lines == whole_step(eager.runner.batch(LONGEST), count, eager.choice)[0].tolist()
