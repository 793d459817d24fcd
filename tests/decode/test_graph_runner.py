"""Captured steps: one graph for each bound, kept as long as its tensors lie where they were, and nothing beside it."""

import copy

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.compiled import LastOperation
from sigma0.decode.runners import GraphRunner
from sigma0.decode.transfer import AsyncCopy
from sigma0.models.row_linear import PackedLinear
from tests.decode.captures import Outside, RepeatedCapture, called_by
from tests.decode.test_conformance import AFTER, written
from tests.marks import needs_compiler, slow
from tests.reference import tiny_model

PROMPTS = [[5, 6, 7], [8, 9]]


def opened(model, config, new, **asked):
    return written(model, PROMPTS, config, new, custom_generate=type(model).open_token_loop, **asked)


@pytest.mark.cpu(3)
@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("after", AFTER)
def test_a_later_run_over_a_cache_launches_the_same_graphs(after):
    model, config, made = tiny_model(seed=3, total_ut_steps=4), ExitConfig(q=0.4, after_exit=after), []
    cache, turn = model.new_cache(64), [5, 6, 7]
    with called_by("captured", model) as (asked, captures):
        for _ in range(4):
            outputs = written(model, [turn], config, 9, past_key_values=cache, **asked)
            turn = [*outputs.sequences[0].tolist(), 8, 9]
            made.append(captures[0].captures)
    assert copy.deepcopy(cache).graphs is None
    assert len(captures) == 1 and made[-1] == made[1] < captures[0].replays


@pytest.mark.slow
def test_weights_in_other_memory_are_captured_anew():
    model, turn, made, first = tiny_model(seed=3, total_ut_steps=4), [5, 6, 7], 0, None
    caches = [model.new_cache(64), model.new_cache(64)]
    for name in ("", "self_attn.q_proj", "mlp.down_proj"):
        if name:
            weight = model.model.layers[0].get_submodule(name).weight
            weight.data = weight.data * -1
        eager = written(model, [turn], ExitConfig(q=0.4), 9, past_key_values=caches[1], runner="eager")
        with called_by("captured", model) as (asked, captures):
            captured = written(model, [turn], ExitConfig(q=0.4), 9, past_key_values=caches[0], **asked)
        assert captured.sequences.equal(eager.sequences) and captured.exit_depths.equal(eager.exit_depths)
        first = captures[0] if captures else first
        assert first.captures > made
        made, turn = first.captures, [*captured.sequences[0].tolist(), 8, 9]


@pytest.mark.slow
def test_graphs_are_few_and_are_for_bounds_on_rows():
    """A power of two each, or all lanes: of five sequences that end one after the other."""
    model = tiny_model(seed=1, total_ut_steps=3)
    with called_by("captured", model) as (asked, captures):
        written(model, [[5 + row] for row in range(5)], ExitConfig(q=0.4), 24, ends={7, 9, 11, 13, 15}, **asked)
    assert captures[0].captures <= (5 * 3).bit_length() + 1 and captures[0].replays > 20


def test_a_graph_is_captured_for_the_next_power_of_two_of_positions():
    bounds = [GraphRunner.bound_on(None, longest) for longest in (1, 1024, 1025, 2048, 5000)]
    assert bounds == [1024, 1024, 2048, 2048, 8192]


@pytest.mark.parametrize("way", ["late", "captured"])
def test_a_step_is_launched_before_the_last_one_is_read(way, monkeypatch):
    """One copy a pass comes to the host, and is waited for once the next step is under way."""
    order, numbers = [], {}
    opens, reads = AsyncCopy.__init__, AsyncCopy.array

    def launched(landing, tensor):
        numbers[id(landing)] = len(numbers), landing
        order.append(("launch", numbers[id(landing)][0]))
        opens(landing, tensor)

    def read(landing):
        order.append(("read", numbers[id(landing)][0]))
        return reads(landing)

    monkeypatch.setattr(AsyncCopy, "__init__", launched)
    monkeypatch.setattr(AsyncCopy, "array", read)
    model = tiny_model(seed=1)
    with called_by(way, model) as (asked, _):
        outputs = written(model, [[5, 6, 7]], ExitConfig(q=0.4), 8, **asked)
    at = {event: place for place, event in enumerate(order)}
    output = [number for kind, number in order if kind == "read"]
    assert output == list(range(outputs.loop_passes)) and len(output) > 3
    assert all(at["launch", number + 1] < at["read", number] for number in output[:-1])
    assert all(at["launch", number + 2] > at["read", number] for number in output if ("launch", number + 2) in at)
    assert len(numbers) <= outputs.loop_passes + 1


def refuse(*_):
    raise AssertionError("a value was looked at")


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("way", ["late", slow("captured")])
def test_a_whole_run_is_looked_at_through_one_door(way, after, monkeypatch):
    """From the first token to the last, and as the run is closed: `np.asarray`, as `AsyncCopy` and `to_host` do it."""
    model = tiny_model(seed=2, total_ut_steps=4)
    with called_by(way, model) as (asked, _):
        loop, first = opened(model, ExitConfig(q=0.4, after_exit=after), 9, **asked)
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
                patch.setattr(torch.Tensor, name, refuse)
            emitted = [emission for emissions in loop.run(first) for emission in emissions]
    assert loop.runner.chosen.late and len(emitted) == 18


class Kept(RepeatedCapture):
    """Keeps the last function that it captured."""

    def __call__(self, function):
        self.function = function
        return super().__call__(function)


def without_memory(part, known):
    """Replaces the tensors that an object holds by such without memory."""
    if id(part) in known or not hasattr(part, "__dict__"):
        return
    known[id(part)] = part

    def moved(value):
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(value.to("meta"), False)
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, list | tuple):
            values = list(map(moved, value))
            return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if type(value).__module__.startswith(("sigma0", "torch.nn", "transformers.models")):
            without_memory(value, known)
        return value

    for name, value in list(vars(part).items()):
        object.__setattr__(part, name, moved(value))


@pytest.mark.parametrize(("after", "draws"), [("finish", False), ("verify", True), slow("drop", True)])
def test_a_step_touches_no_other_device_and_looks_at_nothing(after, draws, monkeypatch):
    """On tensors without memory, whose values nobody can look at; what is made on the host has another device."""
    model = tiny_model(seed=2, total_ut_steps=4)
    with called_by("captured", model, Kept) as (asked, kept):
        asked |= {"do_sample": draws, "top_k": 5 if draws else None}
        written(model, PROMPTS, ExitConfig(q=0.4, after_exit=after), 9, **asked)
        known = {}
        for cell in kept[0].function.__closure__:
            without_memory(cell.cell_contents, known)
        # addresses, by which packed layers know that they still are, are gone
        monkeypatch.setattr(PackedLinear, "_are_packed", lambda product, modules: True)
        with Outside() as called, torch.no_grad():
            outputs = kept[0].function()
    assert {tensor.device.type for tensor in outputs if isinstance(tensor, torch.Tensor)} == {"meta"}
    assert len(called.calls) > 50 and called.devices == {"meta"}


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("after", ["finish", "verify"])
def test_a_compiled_step_is_captured_too(after):
    model = tiny_model(seed=1, num_hidden_layers=1, total_ut_steps=3)

    class Compiled(RepeatedCapture):
        def __init__(self, device):
            super().__init__(device)
            self.sees_memory = False

    with called_by("captured", model, Compiled):
        config = ExitConfig(q=0.4, after_exit=after)
        result = [written(model, PROMPTS, config, 8, runner=runner) for runner in ("cudagraph", "compile")]
    assert [item.runner.name for item in result] == ["cudagraph", "compile"]
    assert all(item.runner.captured for item in result)
    assert result[1].sequences.equal(result[0].sequences) and result[1].exit_depths.equal(result[0].exit_depths)


def test_the_last_operation_is_named():
    with pytest.raises(RuntimeError), LastOperation() as called:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert called.name == "aten.mm.default"


def test_a_tensor_of_the_host_is_told_apart():
    with Outside() as called:
        torch.ones(2, device="meta").add(1)
        torch.ones(2).to("meta")
    assert called.devices == {"meta", "cpu"}
