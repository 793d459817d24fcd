"""The layers of the block in fused kernels: what its modules compute, and the same bits whatever rows come along."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sigma0.decode.attention import PassRows, Placement, RowIndices
from sigma0.decode.ops import TORCH, depth_attention_reference, operations
from sigma0.decode.planes import LayerPlanes
from sigma0.kernels.row_norm_kernel import row_norm
from sigma0.models import fused_rows
from sigma0.models.ouro_block import OuroRMSNorm
from tests.kernels.interpreted.conftest import DEVICE
from tests.kernels.interpreted.test_row_kernels import products_in_order  # noqa: F401
from tests.marks import slow
from tests.models.test_block_in_one_call import LOOPS, PLACES
from tests.models.test_block_in_one_call import case as block_case
from tests.reference import tiny_model, tiny_nanbeige

GridExecutor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
SEQUENCES = 40
FAMILIES = (tiny_model, tiny_nanbeige)


def case(dtype, family=tiny_model):
    return block_case(family, dtype, DEVICE, SEQUENCES)


@pytest.fixture
def fused(monkeypatch):
    """How many passes ran in fused kernels."""
    ran = []

    def counted(*arguments):
        ran.append(True)
        return fused_rows.run_fused(*arguments)

    monkeypatch.setattr("sigma0.models.shared_block.run_fused", counted)
    return ran


def triton(deterministic=True):
    return operations("triton", torch.device(DEVICE), deterministic)


@pytest.mark.grid(fast=3, slow=9)
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_pass_is_that_of_the_modules(dtype, family, fused):
    _, run = case(dtype, family)
    which = torch.arange(19)
    live = which % 4 != 2
    result, written = run(which, triton(), live)
    assert fused == [True]
    expected, kept = run(which, replace(TORCH, depth_attention=None), live)
    others, _ = run(which, triton(deterministic=False), live)
    assert fused == [True]
    # the interpreter cuts bfloat16 off where others round
    step = 1e-5 if dtype == torch.float32 else 0.06
    for ours, theirs in ((result, expected), (result, others)):
        torch.testing.assert_close(ours[live], theirs[live], rtol=step, atol=step * float(expected.abs().max()))
    torch.testing.assert_close(written[..., :-1, :, :], kept[..., :-1, :, :], rtol=step, atol=step * 4)


@pytest.mark.grid(fast=1, slow=9)
@pytest.mark.usefixtures("on_device", "products_in_order")
@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        (torch.float32, tiny_model),
        (torch.bfloat16, tiny_model),
        slow(torch.float32, tiny_nanbeige),
        slow(torch.bfloat16, tiny_nanbeige),
    ],
)
def test_bits_of_a_pass_do_not_depend_on_company(dtype, family, fused):
    model, run = case(dtype, family)
    model.backend = "triton"
    together, written = run(torch.arange(SEQUENCES).flip(0), triton())
    with torch.inference_mode():
        logits = model.read(together)
    for sequence in (0, 7, 39):
        alone, current = run(torch.tensor([sequence]), triton())
        row = SEQUENCES - 1 - sequence
        assert torch.equal(alone[0], together[row])
        with torch.inference_mode():
            assert torch.equal(model.read(alone)[0], logits[row])
        places = slice(sequence * PLACES, (sequence + 1) * PLACES)
        assert torch.equal(current[..., places, :, :], written[..., places, :, :])
    assert len(fused) == 4


class Launches(TorchDispatchMode):
    """Counts operations that are no views and make no empty tensor: on a GPU each is a launch or more."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or "empty" in func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE != "cpu", reason="a profile counts them there")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_is_seven_launches(layers, family, monkeypatch):
    """Beside them a pass has the norm ahead of the first, and counts of parts; its indices are made once."""
    launched, others = [], Launches()
    launch = GridExecutor.__call__

    def counted(executor, *args, **kwargs):
        launched.append(executor.fn.__name__)
        with _disable_current_modes():
            return launch(executor, *args, **kwargs)

    model = family(4, num_hidden_layers=layers)
    model.pack_weights()
    generator = torch.Generator().manual_seed(0)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    kept = [LayerPlanes(torch.empty(heads, 1, width), LOOPS, 2, PLACES) for _ in range(layers)]
    hidden = torch.randn(5, model.config.hidden_size, generator=generator)
    table = torch.tensor([[0, 1, 1, 2], [1, 0, 0, 1], [0, 3, 3, 0], [1, 7, 7, 2], [0, 5, 5, 1]])
    at = RowIndices(*table.unbind(1))
    model.reserve_positions(PLACES, hidden)
    with torch.inference_mode():
        model.loop(hidden, PassRows(kept, Placement(PLACES, 2 * PLACES + 1), at, triton(), PLACES))
        monkeypatch.setattr(GridExecutor, "__call__", counted)
        rows = PassRows(kept, Placement(PLACES, 2 * PLACES + 1), at, triton(), PLACES)
        with others:
            model.loop(hidden, rows)
    assert len(launched) == 7 * layers + 1 and others.count == 1


def test_a_prompt_in_half_precision_is_normed_by_one_kernel(monkeypatch):
    norm = OuroRMSNorm(40, eps=1e-5).to(torch.bfloat16)
    states = torch.randn(2, 3, 80, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)[..., ::2]
    with torch.no_grad():
        norm.weight.normal_(generator=torch.Generator().manual_seed(1))
        expected = norm(states)
        monkeypatch.setattr("sigma0.models.ouro_block._ONE_KERNEL", {"cpu"})
        ran = []
        monkeypatch.setattr("sigma0.models.ouro_block.row_norm", lambda *given: ran.append(True) or row_norm(*given))
        result = norm(states)
    # the interpreter cuts bfloat16 off where others round
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
    assert ran == [True] and norm(states).requires_grad and ran == [True]


@pytest.mark.usefixtures("on_device")
def test_hooked_trained_and_wide_layers_run_as_modules(fused):
    model, run = case(torch.float32)
    calls = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(True))
    run(torch.arange(3), triton())
    assert calls == [True] and fused == []
    handle.remove()
    run(torch.arange(3), triton())
    assert calls == [True] and fused == [True]
    model, run = case(torch.float64)
    run(torch.arange(3), replace(triton(), depth_attention=None))
    assert fused == [True]


def test_one_graph_holds_a_pass(fused):
    model, run = case(torch.float32)
    which = torch.arange(5)
    model.reserve_positions(PLACES, torch.empty(0))
    # kernels that are no operators cannot be traced while they are interpreted
    ops = replace(triton(), depth_attention=depth_attention_reference) if DEVICE == "cpu" else triton()
    expected, kept = run(which, ops)
    compiled, written = run(which, ops, loop=torch.compile(model.loop, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
    assert torch.equal(written, kept)
    assert len(fused) == 2
