"""Captured steps: the tokens of the eager runner, over tensors that stay in place, with one graph for each bound."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sigma0 import ExitConfig
from sigma0.decode import graph_runner, runners
from sigma0.decode.graph_runner import GraphRunner
from sigma0.decode.graphs import CudaCapture, LastOperation
from sigma0.decode.lanes import STAGE
from sigma0.decode.ops import TORCH, depth_attention_reference
from sigma0.decode.programs import tensors_of
from sigma0.decode.runners import choose_runner
from sigma0.decode.step import whole_step
from sigma0.models.row_linear import PackedLinear
from tests.decode.captures import Outside, RepeatedCapture
from tests.decode.test_wave_against_reference import generate, random_config, random_model, random_prompts
from tests.decode.test_whole_step import LONGEST, meaningful, mixed, opened, outcome
from tests.marks import needs_compiler
from tests.reference import tiny_model


@pytest.mark.parametrize("longest, bound", [(1, 1024), (1024, 1024), (1025, 2048), (2048, 2048), (2049, 4096)])
def test_a_graph_is_captured_for_the_next_power_of_two(longest, bound):
    assert GraphRunner.bound_on(object.__new__(GraphRunner), longest) == bound


@pytest.fixture
def captures(monkeypatch):
    """The captures that were made, in place of CUDA's."""
    made = []

    def capture(device):
        made.append(RepeatedCapture(device))
        return made[-1]

    monkeypatch.setattr(runners, "CAPTURES", {"cpu": capture})
    monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({"cpu"}))
    # attention whose calls depend on no value, as a kernel on a device
    monkeypatch.setattr(graph_runner, "_SHORTEST", 1)
    return made


def picking(monkeypatch, model):
    """Gives a model an attention that picks planes, as kernels do."""
    ops = replace(TORCH, depth_attention=depth_attention_reference)
    monkeypatch.setattr(type(model), "operations", property(lambda self: ops))
    return model


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_tokens_depths_and_counts_are_the_eager_runners(after_exit, statistics, captures, monkeypatch):
    rng = random.Random(f"graph {after_exit} {statistics}")
    for _ in range(6):
        model = random_model(rng).double()
        config = random_config(rng, after_exit, model.num_loops)
        prompts, new = random_prompts(rng, model.config.vocab_size), rng.randrange(2, 12)
        settings = {"eos_token_id": [rng.randrange(model.config.vocab_size) for _ in range(3)], "pad_token_id": 0}
        found = []
        for runner in ("eager", "auto"):
            with monkeypatch.context() as patch:
                picking(patch, model)
                if runner == "eager":
                    patch.setattr(runners, "LATE_DEVICES", frozenset())
                wanted = {"runner": runner, "output_statistics": statistics, **settings}
                found.append(generate(model, prompts, config, new, **wanted))
        eager, captured = found
        assert not eager.runner.captured and captured.runner.captured
        assert captured.runner.late is not statistics and captured.runner.name == "cudagraph"
        assert outcome(captured) == outcome(eager), config
        if statistics:
            torch.testing.assert_close(captured.loop_statistics, eager.loop_statistics, equal_nan=True)
            assert captured.loop_fates.equal(eager.loop_fates)
            torch.testing.assert_close(captured.readings, eager.readings, equal_nan=True)
    assert sum(each.replays for each in captures) > 40


def places(loop):
    parts = [loop.runner.lanes, loop.runner.settings, *loop.cache.planes]
    return [tensor.data_ptr() for tensor in tensors_of(parts)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 3])
def test_buffers_stay_in_place_over_two_hundred_passes_of_mixed_work(batch, captures, monkeypatch):
    rng = random.Random(batch)
    model = picking(monkeypatch, random_model(rng))
    loop = mixed(rng, model, batch, draws=True, noted=True)
    runner = loop.runner
    assert isinstance(runner, GraphRunner)
    for sequence in range(batch):
        runner.settings.set_ends([sequence], [], None)
    loop.cache.reserve_positions(512)
    loop.cache.extend(512)
    before, counts = None, set()
    with torch.no_grad():
        for number in range(200):
            step = runner.step(512, loop.choice)
            assert step is not None
            counts.add(runner._bound())
            if number == 4:
                before = places(loop)
    assert places(loop) == before
    assert captures[-1].replays >= 200
    # a graph for each bound on the rows, and no other
    assert captures[-1].captures == len(runner.graphs.steps) <= len(counts) + 1


def test_outside_of_a_graph_nothing_is_called_but_the_copy_of_its_lines(captures, monkeypatch):
    model = picking(monkeypatch, tiny_model(seed=2, total_ut_steps=4))
    loop, first = opened(model, [[5, 6, 7], [8, 9]], ExitConfig(q=0.4), new=60)
    run = loop.run(first)
    for _ in range(12):
        next(run)
    runner = loop.runner
    for step in runner.graphs.steps.values():
        object.__setattr__(step.captured, "replay", lambda: None)
    count, _, longest, *_ = list(runner.graphs.steps)[-1]
    with Outside() as called, torch.no_grad():
        runner._under_way.append(runner._launch(longest, loop.choice, count))
    assert called.calls == ["aten.detach.default", "aten.clone.default"]


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_a_later_run_over_a_cache_launches_the_same_graphs(after_exit, captures, monkeypatch):
    model = picking(monkeypatch, tiny_model(seed=3, total_ut_steps=4).double())
    monkeypatch.setattr(graph_runner, "_SHORTEST", 64)
    config, written = ExitConfig(q=0.4, after_exit=after_exit), []
    for found in (runners.CAPTURES, {}):
        monkeypatch.setattr(runners, "CAPTURES", found)
        cache, turn, made = model.new_cache(64), [5, 6, 7], []
        for _ in range(4):
            outputs = generate(model, [turn], config, 9, past_key_values=cache)
            assert outputs.runner.captured is bool(found)
            turn = [*outputs.sequences[0].tolist(), 8, 9]
            made.append(captures[0].captures)
        written.append(turn)
        assert copy.deepcopy(cache).buffers is None
    assert written[0] == written[1]
    assert len(captures) == 1 and made[-1] == made[1] < captures[0].replays


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 16])
def test_bounds_cover_every_number_of_rows(batch, captures, monkeypatch):
    model = picking(monkeypatch, tiny_model(seed=1, total_ut_steps=3))
    loop, first = opened(model, [[5 + number] for number in range(batch)], ExitConfig(q=0.4))
    loop._begin(first)
    runner, most = loop.runner, batch * 3
    seen = set()
    for live in range(1, most + 1):
        for sequences in range(1, min(batch, live) + 1):
            runner._seen = live, sequences
            bound = runner._bound()
            assert live <= bound <= most
            assert bound == most or bound & (bound - 1) == 0
            seen.add(bound)
    assert len(seen) <= most.bit_length() + 1


@pytest.mark.slow
@given(seed=st.integers(0, 2**16), half=st.booleans())
@settings(max_examples=12, deadline=None)
@example(seed=14, half=True)
def test_what_lies_in_idle_lanes_changes_no_bit_of_the_others(seed, half):
    """A step of the same bound, once more with other tokens in the lanes that are idle."""
    rng = random.Random(seed)
    model = random_model(rng)
    model = model.bfloat16() if half else model.float()
    with pytest.MonkeyPatch.context() as patch:
        picking(patch, model)
        batch = rng.randrange(1, 5)
        ours, theirs = (mixed(random.Random(seed), model, batch, True, noted=True) for _ in range(2))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            lanes = theirs.runner.lanes
            idle = lanes.table[:, STAGE] >= lanes.idle
            noise = torch.randn(lanes.hidden.shape, generator=generator).to(lanes.hidden.dtype)
            lanes.hidden[idle] = noise[idle]
            count = ours.runner.lanes.count
            with torch.no_grad():
                lines = [
                    whole_step(loop.runner.batch(LONGEST), count, loop.choice, suspends=True)[0].tolist()
                    for loop in (ours, theirs)
                ]
            assert meaningful(lines[0][:-1]) == meaningful(lines[1][:-1]) and lines[0][-1] == lines[1][-1]
            for left, right in zip(ours.cache.planes, theirs.cache.planes, strict=True):
                assert left.flat_keys[:, :-1].equal(right.flat_keys[:, :-1])
                assert left.flat_values[:, :-1].equal(right.flat_values[:, :-1])
            live = ours.runner.lanes.table[:, STAGE] < lanes.idle
            assert ours.runner.lanes.hidden[live].equal(theirs.runner.lanes.hidden[live])
            # some products read beyond a row, and so would take NaN from the lane beside
            assert theirs.runner.lanes.hidden.isfinite().all()


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("after_exit", ["finish", "verify"])
def test_a_compiled_step_is_captured_too(after_exit, captures, monkeypatch):
    model = picking(monkeypatch, tiny_model(seed=1, num_hidden_layers=1, total_ut_steps=3))
    config, prompts = ExitConfig(q=0.4, after_exit=after_exit), [[5, 6, 7], [8, 9]]

    class Compiled(RepeatedCapture):
        def __init__(self, device):
            super().__init__(device)
            self.sees_memory = False

    monkeypatch.setattr(runners, "CAPTURES", {"cpu": Compiled})
    found = [generate(model, prompts, config, 8, runner=runner) for runner in ("cudagraph", "compile")]
    assert [each.runner.name for each in found] == ["cudagraph", "compile"]
    assert all(each.runner.captured for each in found)
    assert outcome(found[1]) == outcome(found[0])


@pytest.mark.slow
def test_weights_in_other_memory_are_captured_anew(captures, monkeypatch):
    model = picking(monkeypatch, tiny_model(seed=3, total_ut_steps=4).double())
    monkeypatch.setattr(graph_runner, "_SHORTEST", 64)
    caches, turn, made = [model.new_cache(64), model.new_cache(64)], [5, 6, 7], 0
    for name in ("", "self_attn.q_proj", "mlp.down_proj"):
        if name:
            weight = model.model.layers[0].get_submodule(name).weight
            weight.data = weight.data * -1
        captured, eager = (
            generate(model, [turn], ExitConfig(q=0.4), 9, past_key_values=cache, runner=runner)
            for cache, runner in zip(caches, ("auto", "eager"), strict=True)
        )
        assert outcome(captured) == outcome(eager)
        assert captures[0].captures > made
        made, turn = captures[0].captures, [*captured.sequences[0].tolist(), 8, 9]


def test_names_and_reasons(captures):
    model = tiny_model(seed=1)
    assert choose_runner("auto", model).captured and choose_runner("auto", model).late
    assert not choose_runner("auto", model, waits="somebody waits").late
    python = choose_runner("cudagraph", model, python="only Python knows")
    assert (python.name, python.captured, python.reason) == ("eager", False, "only Python knows")
    assert not choose_runner("eager", model).captured
    model.lm_head.register_forward_hook(lambda *_: None)
    assert "hooks" in choose_runner("cudagraph", model).reason


def test_a_cpu_has_no_graphs():
    chosen = choose_runner("cudagraph", tiny_model(seed=1))
    assert (chosen.name, chosen.captured) == ("eager", False) and "no CUDA graphs on cpu" in chosen.reason
    assert list(runners.CAPTURES) == ["cuda"] and runners.CAPTURES["cuda"] is CudaCapture


def test_the_last_operation_is_named():
    with pytest.raises(RuntimeError), LastOperation() as called:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert called.name == "aten.mm.default"


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("after", [("finish",), ("verify",), ("drop",), ("finish", "verify", "drop")])
def test_a_step_touches_no_other_device_and_looks_at_nothing(after, draws):
    """On tensors without memory, whose values nobody can look at; what is made on the host has another device."""
    rng = random.Random(f"{after} {draws}")
    model = random_model(rng)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        picking(patch, model)
        loop = mixed(rng, model, 2, draws, noted=True, afters=after)
        runner = loop.runner
        model.reserve_positions(LONGEST, runner.lanes.hidden)
        batch = runner.batch(LONGEST)
        known: set[int] = set()
        for part in (model, batch, loop.choice):
            without_memory(part, known)
        # addresses, by which packed layers know that they still are, are gone
        patch.setattr(PackedLinear, "_are_packed", lambda product, modules: True)
        with Outside() as called:
            lines, logits = whole_step(batch, runner.lanes.count, loop.choice, suspends=True)
    assert lines.device.type == logits.device.type == "meta"
    assert len(called.calls) > 50 and called.devices == {"meta"}


def without_memory(part, known):
    """Replaces the tensors that an object holds by such without memory."""
    if id(part) in known or not hasattr(part, "__dict__"):
        return
    known.add(id(part))

    def moved(value):
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(value.to("meta"), False)
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, list | tuple):
            return type(value)(map(moved, value))
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        if type(value).__module__.startswith(("sigma0", "torch.nn", "transformers.models")):
            without_memory(value, known)
        return value

    for name, value in list(vars(part).items()):
        object.__setattr__(part, name, moved(value))


def test_a_tensor_of_the_host_is_told_apart():
    with Outside() as called:
        torch.ones(2, device="meta").add(1)
        torch.ones(2).to("meta")
    assert called.devices == {"meta", "cpu"}
