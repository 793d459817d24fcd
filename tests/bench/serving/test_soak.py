import json

import httpx
import pytest

pytest.importorskip("fastapi")

from sigma0.bench.core.conditions import read_report
from sigma0.bench.serving.floods import BODY, REFUSALS, Flooding, Floods
from sigma0.bench.serving.soak import Sample, Soak, lines_of
from tests.bench.running import RESULTS, bench
from tests.serve.conftest import plain  # noqa: F401


def sample(seconds=1.0, memory=100.0, **counts):
    return Sample(seconds=seconds, memory_mb=memory, **{"pages_used": 0, "running": 0, "waiting": 0, **counts})


def told(**changes):
    samples = [sample(1, 100.0, pages_used=4, running=2), sample(2, 101.0)]
    given = {"seconds": 10, "clients": 2, "asked": 9, "answered": 8, "left": 1, "samples": samples, "exit_code": 0}
    return Soak(**{**given, **changes})


@pytest.mark.parametrize(
    "fault",
    [
        {"wrong": 1},
        {"answered_twice": 1},
        {"broken": {"ReadError": 1}},
        {"lost_after_term": 1},
        {"exit_code": -9},
        {"floods": Floods(clients=3, broken={"status 500": 1})},
        {"samples": [sample(pages_used=1)]},
        {"samples": [sample(running=1)]},
        {"samples": [sample(waiting=1)]},
    ],
    ids=str,
)
def test_every_fault_counts(fault):
    assert told(floods=Floods(clients=3, refused={"400": 5})).is_sound
    assert not told(**fault).is_sound


@pytest.mark.parametrize(("last", "flat"), [(100.0, True), (102.9, True), (90.0, True), (103.1, False), (200.0, False)])
def test_memory_that_grows_is_a_fault_of_a_long_load(last, flat):
    # it warms up, stays, and ends somewhere
    samples = [sample(memory=memory) for memory in (60.0, 60.0, *[100.0] * 16, last, last)]
    long, short = told(seconds=1800, samples=samples), told(seconds=60, samples=samples)
    assert long.memory_is_flat is flat and long.is_sound is flat and long.model_dump()["memory_is_flat"] is flat
    assert lines_of(long)[3].endswith(": flat" if flat else ": not flat")
    assert short.memory_is_flat is None and short.is_sound and "too short" in lines_of(short)[3]


def test_it_is_told_in_words_and_kept_as_json():
    text = "\n".join(lines_of(told()))
    assert "9 requests" in text and "8 answered, 1 left" in text and "0 pages held at rest" in text
    assert "floods" not in text and told().model_dump()["floods"] is None
    broken = {"ReadError": 1}
    floods = {"clients": 3, "refused": {"400": 5}, "left": 7, "half_sent": 2, "broken": broken}
    floods |= {"median_ms_without": 30.0, "median_ms_with": 45.5}
    flooded = told(floods=floods, broken=broken)
    text = lines_of(flooded)[-1]
    assert "3 clients" in text and "7 left, 2 half sent" in text and "30 ms and 46 ms" in text
    kept = json.loads(json.dumps(flooded.model_dump()))
    assert kept["broken"] == broken and floods.items() <= kept["floods"].items()


@pytest.mark.parametrize("kind", range(3))
def test_a_flood_sends_what_never_fits(kind, plain):  # noqa: F811
    path, body = Flooding(plain.url, "pocket", ["Hi"], 3, 1.0)._body(kind)
    assert 0.9 * BODY < len(body) <= BODY
    answer = httpx.post(f"{plain.url}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code in REFUSALS and answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_committed_one_is_what_the_readme_says():
    _, kept = read_report(RESULTS / "soak-pocket.json")
    obtained = Soak(**kept)
    # the verdict is made again from the samples
    assert obtained.memory_is_flat and obtained.is_sound
    assert obtained.seconds >= 1800 and obtained.clients == 12 and obtained.preemptions > 0
    assert obtained.left > 0.08 * obtained.asked


@pytest.mark.exhaustive
def test_a_short_one(tmp_path):
    out = tmp_path / "soak.json"
    bench("soak", "--minutes", 0.2, "--clients", 6, "--out", out)
    told = json.loads(out.read_text())
    assert told["answered"] > 10 and told["asked"] >= told["answered"] + told["left"]
    assert told["wrong"] == told["answered_twice"] == told["lost_after_term"] == 0 and told["broken"] == {}
    assert told["samples"][-1]["pages_used"] == 0 and told["exit_code"] == 0
    floods = told["floods"]
    assert floods["clients"] == 6 and sum(floods["refused"].values()) > 0 and floods["broken"] == {}
    assert floods["left"] > 0 and floods["half_sent"] > 0
