"""The operators of a few rows inside a compiled graph, and in a CUDA graph."""

import pytest
import torch

from tests.kernels.interpreted.conftest import DEVICE
from tests.kernels.interpreted.test_row_kernels import calls

NAMES = ("row_qkv", "row_linear", "row_parts", "row_norm", "row_residual", "row_gated")


def made(name):
    with torch.device(DEVICE):
        return calls()[name]


def results(function, arguments):
    """What a call returns, and all that it may have written to."""
    output = function(*arguments)
    return [*(output if isinstance(output, tuple) else (output,)), *arguments]


def assert_same(result, expected):
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_does_what_its_schema_says(name):
    """What it writes, the shapes that it returns, and tracing with sizes that are not known."""
    torch.library.opcheck(getattr(torch.ops.sigma0, name).default, made(name)[1])


@pytest.mark.skipif(DEVICE != "cuda", reason="there are no CUDA graphs elsewhere")
@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_graph_replays_it(name):
    function, arguments = made(name)
    expected = [part.clone() if isinstance(part, torch.Tensor) else part for part in results(function, arguments)]
    graph, others = torch.cuda.CUDAGraph(), made(name)[1]
    with torch.cuda.graph(graph):
        result = results(function, others)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(result, expected)
