"""Bytes of a token against a case computed by hand, the runner that a row names, and the page's section."""

from dataclasses import replace

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.bench.core.conditions import Digests, Figure, describe
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.rows import SpeedRow
from sigma0.bench.speed.decoders import Decoded
from sigma0.bench.speed.measure import Plan, measure
from sigma0.bench.speed.roofline import bytes_per_token, launch_table, roofline, roofline_table
from sigma0.bench.speed.table import speed_parts
from sigma0.decode import runners
from sigma0.decode.ops import TORCH, depth_attention_reference
from tests.bench.running import bench
from tests.decode.captures import RepeatedCapture
from tests.reference import tiny_model

# whichever comes first measures how fast memory is copied
pytestmark = pytest.mark.cpu(4)
NEW_FIELDS = ("copy_bandwidth", "block_bytes_per_token", "head_bytes_per_token", "kv_bytes_per_token")


def measured(model, ways=("full", "finish"), new_tokens=4):
    ids = torch.tensor([[9, 10, 11, 12]])
    plan = Plan(ways, ExitConfig(q=0.4), None, "", new_tokens, 1, 1)
    rows = [tuple(row) for row in ids.tolist()]
    digests = Digests(weights_sha256="", settings_sha256="")
    conditions = describe(model, "tiny", "ids", rows, [None], new_tokens, digests=digests)
    return {row.way: row for row in measure(model, ids, plan, conditions)}


def test_bytes_are_those_computed_by_hand():
    # 2 layers, 2 K/V heads of width 8, vocabulary 61, width 32, 4 loops, float32
    model = tiny_model(seed=1, total_ut_steps=4)
    block = 4 * sum(parameter.numel() for parameter in model.model.layers.parameters())
    # of 4 fed tokens of each of two sequences
    run = Decoded(1.0, 8, 20, 12, torch.zeros(2, 5), 0, 0)
    # After the first of 5 tokens, 4 are fed at positions 6 to 9; their rows read 7, 8, 9 and 10 positions of a plane,
    # each of 2 layers * (keys, values) * 2 heads * 8 numbers * 4 bytes.
    columns = (7 + 8 + 9 + 10) / 4
    assert bytes_per_token(model, run, 6) == {
        "block_bytes_per_token": 2.0 * block,
        "head_bytes_per_token": 1.5 * 61 * 32 * 4,
        "kv_bytes_per_token": columns * 2 * 2 * 2 * 8 * 4 * 2.5 * 2,
    }
    # a graph reads the head in every pass; and a pass reads it once for all of its rows
    for changes in ({"captured": True}, {"head_rows": 28}):
        other = bytes_per_token(model, replace(run, **changes), 6)
        assert other["head_bytes_per_token"] == 2 * 61 * 32 * 4


@pytest.mark.cpu(5)  # it measures the memory's bandwidth, once for the others as well
def test_a_run_counts_bytes_of_full_depth_and_names_the_runner_that_ran():
    model = tiny_model(seed=1, total_ut_steps=4)
    model.runner = "compile"
    # what only Python can call: a step with hooks is not compiled
    model.model.layers[0].register_forward_hook(lambda *_: None)
    rows = measured(model)
    assert {row.runner for row in rows.values()} == {"eager"}
    row = rows["full"]
    block = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    assert row.block_bytes_per_token == 4 * block and row.head_bytes_per_token == 61 * 32 * 4
    # tokens at positions 4, 5 and 6, each with a row in every one of 4 planes
    assert row.kv_bytes_per_token == 4 * (5 + 6 + 7) / 3 * 256
    assert row.copy_bandwidth > 0


@pytest.mark.slow
def test_a_row_names_graphs_and_counts_a_head_for_each_pass(monkeypatch):
    model = tiny_model(seed=1, total_ut_steps=4)
    ops = replace(TORCH, depth_attention=depth_attention_reference)
    monkeypatch.setattr(type(model), "operations", property(lambda self: ops))
    monkeypatch.setattr(runners, "CAPTURES", {"cpu": RepeatedCapture})
    monkeypatch.setattr(runners, "ASYNC_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(runners, "_SHORTEST", 1)
    model.runner = "cudagraph"
    rows = measured(model, ("full", "finish", "huggingface"))
    assert [rows[way].runner for way in ("full", "finish", "huggingface")] == ["cudagraph", "cudagraph", "eager"]
    head = 61 * 32 * 4
    assert rows["full"].head_bytes_per_token == 4 * head and rows["huggingface"].head_bytes_per_token == head


def test_a_runner_that_cannot_be_had_is_told(ledger):
    asked = ("--shape", "tiny", "--device", "cpu", "--context", 4, "--new-tokens", 3, "--rounds", 1, "--ways", "full")
    result = bench("speed", *asked, "--runner", "cudagraph", "--out", ledger)
    assert [row.runner for row in read_rows(ledger)] == ["eager"]
    assert "cudagraph was asked for, but some ran eager: no CUDA graphs on cpu" in result.stderr
    reported = " ".join(result.stdout.split())
    assert "tokens/s of a copy" in reported and "A copy moves" in reported


def timed(**changes):
    """A row of round numbers: 100, 20 and 40 MB a token, at 10 GB/s 10, 2 and 4 ms of 20."""
    figure = {"value": 20.0, "low": 20.0, "high": 20.0}
    row = measured(tiny_model(seed=1, total_ut_steps=4), ("full",))["full"]
    given = dict(zip(NEW_FIELDS, (1e10, 1e8, 2e7, 4e7), strict=True))
    given |= {"milliseconds_per_token": Figure(**figure), "passes_per_token": 4.0}
    return row.model_copy(update=given | changes)


@pytest.mark.slow
def test_where_the_time_of_a_token_goes():
    roof = roofline(timed())
    times = {"block": 10.0, "head": 2.0, "K/V": 4.0, "ideal": 16.0, "rest": 4.0, "rest/pass": 1000.0}
    expected = {**times, "of a copy": 80.0, "MB/token": 160.0, "ms/token": 20.0}
    assert {name: roof[name] for name in expected} == pytest.approx(expected)
    (line,) = roofline_table([timed()]).rows
    assert line[3:] == ["80.0 %", "160", "20", "16", "10", "2", "4", "4", "1000"]


@pytest.mark.exhaustive
def test_rows_from_before_stay_valid_and_have_no_roofline():
    old = timed().model_dump(exclude=set(NEW_FIELDS))
    row = SpeedRow.model_validate(old)
    assert all(getattr(row, name) is None for name in NEW_FIELDS)
    assert roofline(row) is None and roofline_table([row]) is None
    assert len(speed_parts([row])) == 2 and "### Roofline" in speed_parts([timed()])


@pytest.mark.exhaustive
def test_the_last_run_of_each_size_and_runner_is_shown():
    eager, graphs = timed(time="1"), timed(time="2", runner="cudagraph")
    page = "\n".join(speed_parts([eager, graphs, timed(time="3"), timed(time="4", context=9)]))
    assert page.count("| full | eager |") == 2 and page.count("| full | cudagraph |") == 1


@pytest.mark.exhaustive
def test_what_launches_cost_is_told_by_runner():
    assert launch_table([timed(), timed(time="3"), timed(way="huggingface", runner="eager")]) is None
    graphs = timed(runner="cudagraph", milliseconds_per_token=Figure(value=17.0, low=17.0, high=17.0))
    table = launch_table([graphs, timed(), timed(context=9)])
    assert table.headings[-2:] == ("eager", "cudagraph")
    # 20 and 17 ms of which 16 are bytes, over 4 passes
    assert [line[-4:] for line in table.rows] == [["full", "full", "1000", "250"]]
    assert "## Launches" in speed_parts([timed(time="1"), graphs])
