from itertools import product

import pytest

import sigma0
from sigma0 import ExitConfig
from sigma0.bench.core.ledger import parse_row, read_rows
from sigma0.bench.quantization.measure import fidelity, latest_quantization, whole
from sigma0.bench.speed import shapes
from tests.bench.running import bench, refused

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow
SMALL = ("--n", 3, "--max-new-tokens", 5, "--context", 9, "--new-tokens", 4, "--rounds", 2)


def test_rows_of_a_model_and_of_a_shape(ledger, monkeypatch):
    shape = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setitem(shapes.SHAPES, "tiny", {**shape, "num_hidden_layers": 2, "num_attention_heads": 4})
    result = bench("quantization", "pocket", *SMALL, "--out", ledger, "--json")
    rows = [parse_row(line) for line in result.stdout.splitlines()]
    assert read_rows(ledger) == rows
    assert [(row.mode, row.quantization) for row in rows] == list(product(("full", "margin"), ("int8", "int4")))
    for row in rows:
        assert row.block_bytes < row.block_bytes_of_floats < row.model_bytes_of_floats
        assert row.agreement.value > 0.9 and row.kl.value < 0.1
        assert row.mean_depth_of_floats.value <= row.total_loops
    assert rows[0].mean_depth.value == rows[0].total_loops
    assert {(row.dtype, row.dtype_of_floats) for row in rows} == {("bfloat16", "bfloat16")}
    bench("quantization", "--shape", "tiny", "--to", "int8", "--floats", "float32", *SMALL, "--out", ledger)
    *_, random = read_rows(ledger)
    assert (random.dtype, random.dtype_of_floats) == ("bfloat16", "float32")
    assert random.model == "random tiny" and random.agreement is random.mean_depth is None
    of_model, of_shape = (whole(item) for item in latest_quantization(read_rows(ledger)))
    assert "margin" in of_model and "random weights" in of_shape and of_model.count("int4") == 2


def test_bad_requests_are_one_line():
    assert "either a model or --shape" in refused("quantization")
    assert "no such quantization: 'int2'" in refused("quantization", "pocket", "--to", "int2")
    assert "pocket's world" in refused("quantization", "nothing")


def test_a_model_agrees_with_itself_and_not_with_another():
    floats, other = (sigma0.load(name, device="cpu", dtype="float32")[0] for name in ("pocket", "pocket-large"))
    prompts, config = [(5, 6, 7), (8, 9, 10)], ExitConfig(mode="full")
    texts = [((11, 12, 13), (6, 6, 6)), ((14, 15), (6, 6))]
    same = fidelity(floats, floats, prompts, texts, config, 4)
    assert same["agreement"].value == 1 and same["kl"].value == 0
    assert same["mean_depth"].value == same["mean_depth_of_floats"].value == floats.num_loops
    apart = fidelity(floats, other, prompts, texts, config, 4)
    assert apart["kl"].value > 0.01 and apart["mean_depth"].value == other.num_loops
