"""The layers of a block in one call on a CPU: what its modules compute in float64, the same bits in any company."""

import pytest
import torch
from torch import nn

from sigma0.decode.attention import PassRows, Placement, RowIndices
from sigma0.decode.ops import MOST_ROWS, TORCH, operations
from sigma0.decode.planes import LayerPlanes
from sigma0.models import fused_rows
from sigma0.models.ouro import OuroForCausalLM
from tests.marks import needs_compiler
from tests.reference import tiny_model, tiny_nanbeige

pytestmark = needs_compiler
SEQUENCES, LOOPS, PLACES = 140, 3, 12
MAX_ROWS = MOST_ROWS[torch.float32]
CPU = operations("auto", torch.device("cpu"))


def case(family, dtype=torch.float32, device="cpu", sequences=SEQUENCES):
    """A model, and a function that runs some rows, each of its own sequence, and returns their output and all K/V."""
    model = family(4, num_hidden_layers=2)
    generator = torch.Generator(device).manual_seed(0)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    hidden = torch.randn(sequences, model.config.hidden_size, generator=generator)
    positions, loops = (torch.randint(0, most, (sequences,), generator=generator) for most in (PLACES, LOOPS))
    filled = torch.randn(2, 2, LOOPS, sequences * PLACES + 1, heads, width, generator=generator)
    model = model.to(dtype)

    def run(which, ops, live=None, loop=model.loop):
        layers = [LayerPlanes(torch.empty(heads, 1, width, dtype=dtype), LOOPS, sequences, PLACES) for _ in filled]
        for layer, (keys, values) in zip(layers, filled, strict=True):
            layer.flat_keys, layer.flat_values = keys.to(dtype, copy=True), values.to(dtype, copy=True)
        at = RowIndices(which, positions[which], positions[which], loops[which])
        rows = PassRows(layers, Placement(PLACES, sequences * PLACES + 1), at, ops, PLACES, live)
        with torch.inference_mode():
            output = loop(hidden[which].to(dtype), rows)
        return output, torch.stack([torch.stack([layer.flat_keys, layer.flat_values]) for layer in layers])

    return model, run


@pytest.fixture
def calls(monkeypatch):
    """How many passes ran in one call."""
    ran = []

    def counted(*arguments):
        output = fused_rows.block_of(*arguments)
        ran.append(output is not None)
        return output

    monkeypatch.setattr("sigma0.models.shared_block.block_of", counted)
    return ran


@pytest.mark.parametrize("family", [tiny_model, tiny_nanbeige])
@pytest.mark.parametrize("count", [1, 3, 4, 7, MAX_ROWS])
def test_rows_are_what_the_layers_make_of_them(family, count, calls):
    which = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(count))[:count]
    output, planes = case(family)[1](which, CPU)
    assert calls == [True]
    wide, wide_planes = case(family, torch.float64)[1](which, TORCH)
    torch.testing.assert_close(output.double(), wide, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(planes.double(), wide_planes, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [tiny_model, tiny_nanbeige])
def test_a_row_has_the_same_bits_in_any_company(family, calls):
    _, run = case(family)
    whole, _ = run(torch.arange(MAX_ROWS), CPU)
    for first, last in ((0, 1), (5, 8), (2, 21)):
        assert torch.equal(run(torch.arange(first, last), CPU)[0], whole[first:last])
    assert calls == [True] * 4


def test_more_rows_other_numbers_and_changed_layers_run_as_modules(calls):
    model, run = case(tiny_model)
    run(torch.arange(MAX_ROWS + 1), CPU)
    case(tiny_model, torch.bfloat16)[1](torch.arange(2), CPU)
    model.model.layers[0].mlp.register_forward_hook(lambda *arguments: None)
    run(torch.arange(2), CPU)
    model.model.layers[0].mlp._forward_hooks.clear()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    run(torch.arange(2), CPU)
    assert calls == []


def test_norms_that_differ_run_as_modules(calls):
    model, run = case(tiny_model)
    before, _ = run(torch.arange(2), CPU)
    model.model.layers[1].input_layernorm.variance_epsilon = 1.0
    after, _ = run(torch.arange(2), CPU)
    assert calls == [True, False]
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(
    "changed",
    [lambda weight: weight.double(), lambda weight: torch.stack([weight, torch.full_like(weight, 7.0)], 1)[:, 0]],
    ids=["of another dtype", "not contiguous"],
)
def test_norms_in_other_memory_run_as_modules(changed, calls):
    model, run = case(tiny_model)
    wanted, _ = run(torch.arange(3), CPU)
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(changed(norm.weight.data))
    torch.testing.assert_close(run(torch.arange(3), CPU)[0], wanted, atol=1e-5, rtol=1e-5)
    assert calls == [True]


@pytest.mark.parametrize("count", [1, 3])
def test_positions_that_the_table_lacks_are_refused(count):
    model, _ = case(tiny_model)
    like = torch.empty(model.config.num_key_value_heads, 1, model.config.head_dim)
    layers = [LayerPlanes(like, LOOPS, 4, PLACES)] * 2
    which = torch.arange(count)
    at = RowIndices(which, which, which + 10**6, which)
    hidden = torch.randn(count, model.config.hidden_size)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="rotary table"):
        model.loop(hidden, PassRows(layers, Placement(PLACES, 4 * PLACES + 1), at, CPU, PLACES))


def test_texts_may_begin_at_any_position():
    model, ids = tiny_model(4, num_hidden_layers=2).eval(), torch.tensor([[5, 6, 7], [8, 9, 10]])
    mask = torch.ones_like(ids)

    def written(first):
        at = torch.arange(first, first + 3).expand(2, 3)
        new = model.generate(ids, attention_mask=mask, position_ids=at, max_new_tokens=4, do_sample=False)
        with torch.no_grad():
            prompt = model(ids, position_ids=at, use_cache=True)
            step = model(ids[:, :1], past_key_values=prompt.past_key_values, position_ids=at[:1, -1:] + 1)
        return new, step.logits

    (new, logits), (far, far_logits) = written(0), written(5000)
    assert torch.equal(new, far)
    torch.testing.assert_close(logits, far_logits, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kept, computed", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_cache_of_another_dtype_is_refused(kept, computed):
    model, ids = tiny_model(4, num_hidden_layers=2).eval().to(kept), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model.to(computed)
        with pytest.raises((ValueError, RuntimeError), match=r"dtype|begin a new cache"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("stage", ["enter", "loop", "norm", "gate", "read"])
def test_a_stage_of_a_class_below_runs_as_it_is(stage):
    model = tiny_model(4, num_hidden_layers=2)
    ids = torch.arange(5, 12)[None]

    def negated(self, *arguments):
        return getattr(OuroForCausalLM, stage)(self, *arguments).neg()

    def exits():
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "exit_config": {"q": 0.9}}
        output = model.generate(ids, return_dict_in_generate=True, **options)
        return output.sequences.tolist(), output.exit_depths.tolist()

    current = exits()
    model.__class__ = type("Negated", (OuroForCausalLM,), {stage: negated})
    fast = exits()
    model.backend = "torch"
    assert fast == exits()
    assert fast != current
