"""The soak: what it counts as sound, and a short one of a real server."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi")

from sigma0.bench.__main__ import app
from sigma0.bench.core.provenance import read_report
from sigma0.bench.serving.floods import BODY, REFUSALS, Flooding, Floods
from sigma0.bench.serving.soak import Sample, Soak
from sigma0.bench.serving.soak_command import is_sound, lines_of
from tests.serve.conftest import plain  # noqa: F401

ROOT = Path(__file__).parents[3]
GOOD = Soak(10, 2, asked=9, answered=8, left=1, samples=[Sample(1, 100.0, 4, 2, 0), Sample(2, 101.0, 0, 0, 0)])


@pytest.mark.parametrize(
    "fault",
    [
        {"wrong": 1},
        {"answered_twice": 1},
        {"broken": Counter({"ReadError": 1})},
        {"lost_after_term": 1},
        {"exit_code": -9},
        {"floods": Floods(3, broken=Counter({"status 500": 1}))},
        {"samples": [Sample(1, 100.0, 1, 0, 0)]},
        {"samples": [Sample(1, 100.0, 0, 1, 0)]},
        {"samples": [Sample(1, 100.0, 0, 0, 1)]},
    ],
    ids=str,
)
def test_every_fault_counts(fault):
    assert is_sound(replace(GOOD, exit_code=0, floods=Floods(3, refused=Counter({"400": 5}))))
    assert not is_sound(replace(GOOD, **{"exit_code": 0, **fault}))


def curve(last):
    """Memory that warms up, stays, and ends somewhere."""
    return [Sample(second, memory, 0, 0, 0) for second, memory in enumerate([60.0, 60.0, *[100.0] * 16, last, last])]


@pytest.mark.parametrize(("last", "flat"), [(100.0, True), (102.9, True), (90.0, True), (103.1, False), (200.0, False)])
def test_memory_that_grows_is_a_fault_of_a_long_load(last, flat):
    long = replace(GOOD, seconds=1800, samples=curve(last), exit_code=0)
    assert long.memory_is_flat is flat and is_sound(long) is flat and long.to_dict()["memory_is_flat"] is flat
    assert lines_of(long)[3].endswith(": flat" if flat else ": not flat")
    short = replace(long, seconds=60)
    assert short.memory_is_flat is None and is_sound(short) and "too short" in lines_of(short)[3]


def test_it_is_told_in_words():
    text = "\n".join(lines_of(replace(GOOD, exit_code=0)))
    assert "9 requests" in text and "8 answered, 1 left" in text and "0 pages held at rest" in text


def test_floods_are_told_beside_it_and_kept_as_json():
    assert "floods" not in "\n".join(lines_of(GOOD)) and GOOD.to_dict()["floods"] is None
    floods = Floods(3, Counter({"400": 5}), 7, 2, Counter({"ReadError": 1}), 30.0, 45.5)
    flooded = replace(GOOD, floods=floods, broken=Counter({"ReadError": 1}))
    text = lines_of(flooded)[-1]
    assert "3 clients" in text and "7 left, 2 half sent" in text and "30 ms and 46 ms" in text
    told = json.loads(json.dumps(flooded.to_dict()))
    assert told["broken"] == {"ReadError": 1} and told["floods"]["refused"] == {"400": 5}
    assert told["floods"]["median_ms_with"] == 45.5


@pytest.mark.parametrize("kind", range(3))
def test_a_flood_sends_what_never_fits(kind, plain):  # noqa: F811
    path, body = Flooding(plain.url, "pocket", ["Hi"], 3, 1.0)._body(kind)
    assert 0.9 * BODY < len(body) <= BODY
    answer = httpx.post(f"{plain.url}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code in REFUSALS and answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_committed_one_is_what_the_readme_says():
    _, told = read_report(ROOT / "bench" / "results" / "soak-pocket.json")
    # the verdict is made again from the samples
    for name in ("model", "kv_memory", "commit", "memory_is_flat"):
        told.pop(name, None)
    samples = [Sample(**sample) for sample in told.pop("samples")]
    found = Soak(samples=samples, **{**told, "broken": Counter(told["broken"])})
    assert is_sound(found) and found.seconds >= 1800 and found.clients == 12 and found.preemptions > 0
    assert found.left > 0.08 * found.asked
    assert found.memory_is_flat


@pytest.mark.exhaustive
def test_a_short_one(tmp_path):
    out = tmp_path / "soak.json"
    result = CliRunner().invoke(app, ["soak", "--minutes", "0.2", "--clients", "6", "--out", str(out)])
    assert result.exit_code == 0, result.output
    told = json.loads(out.read_text())
    assert told["answered"] > 10 and told["asked"] >= told["answered"] + told["left"]
    assert told["wrong"] == told["answered_twice"] == told["lost_after_term"] == 0 and told["broken"] == {}
    assert told["samples"][-1]["pages_used"] == 0 and told["exit_code"] == 0
    floods = told["floods"]
    assert floods["clients"] == 6 and sum(floods["refused"].values()) > 0 and floods["broken"] == {}
    assert floods["left"] > 0 and floods["half_sent"] > 0
