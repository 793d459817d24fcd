import json
from itertools import product

import pytest

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.rows import SIMULATION_SIZES, Tail
from sigma0.bench.rerun.recipes import differences
from sigma0.bench.simulation.cluster import Traffic
from sigma0.bench.simulation.command import COMPARED
from sigma0.bench.simulation.inputs import Inputs, read_inputs
from sigma0.bench.simulation.study import Fleets, Setting, simulate
from sigma0.bench.simulation.table import apart_cells, cells, is_unsettled, latest_simulation, whole
from tests.bench.core.test_ledger import CONDITIONS
from tests.bench.running import LEDGER, RESULTS, bench, refused

pytestmark = pytest.mark.slow
QUICK = (
    *("--replicas", "2,4", "--requests", "60", "--runs", "2", "--warm", "10", "--group", "4"),
    *("--routings", "random,least-loaded,depth-aware"),
)


def inputs_of(**changes):
    times = {"request_ms": 0.1, "chunk_ms": 0.0, "telling_ms": 1.0, "token_ms": 0.2, "begun_ms": 0.0, "ended_ms": 0.0}
    times |= {"passes": 9, "paces": [1.0], "explained": 0.9}
    points = [{"rows": 1, "milliseconds": 2.0}, {"rows": 64, "milliseconds": 4.0}]
    answers = [{"prompt": 30 + 10 * number, "depths": [1 + number, 2, 3]} for number in range(3)]
    values = {
        "conditions": CONDITIONS,
        "clock": "none",
        "machine_load": (0.0, 1),
        "loops": 6,
        "running": 4,
        "pass_rows": 64,
        "page": 16,
        "kept": 4096,
        "pass_times": {"by_rows": points, **times},
        "kinds": {
            "short": {"exit_config": {"mode": "qexit"}, "answers": answers},
            "long": {"exit_config": {"mode": "full"}, "answers": [{**item, "depths": [6, 6, 6]} for item in answers]},
        },
        **changes,
    }
    return Inputs.model_validate(values)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "inputs.json"
    path.write_text(inputs_of().model_dump_json())
    return path


@pytest.fixture(scope="module")
def fleets():
    return Fleets(inputs_of(), "digest")


TRAFFIC = Traffic()


def simulated(fleets, routing, replicas, rate, requests, traffic=TRAFFIC, **more):
    return simulate(fleets, Setting(routing, replicas, rate, traffic, requests, **more))


@pytest.mark.exhaustive
def test_a_row_for_each_fleet_rate_and_routing_and_a_page_of_them(file, ledger, tmp_path):
    folder, picture = tmp_path / "report", tmp_path / "one.svg"
    asked = ("simulate", "--inputs", file, *QUICK, "--rates", "5,40", "--out", ledger)
    assert "SIMULATED" in bench(*asked, "--picture", picture).stdout
    assert "SIMULATION, not measured" in picture.read_text()
    rows = read_rows(ledger)
    routings = ("random", "least-loaded", "depth-aware")
    settings = [(row.replicas, row.rate, row.routing) for row in rows]
    assert settings == list(product((2, 4), (5.0, 40.0), routings))
    for row in rows:
        for tail in (row.queue_ms, row.first_token_ms, row.latency_ms, *row.by_kind_ms.values()):
            assert 0 <= tail.p50 <= tail.p95 <= tail.p99
        assert row.queue_ms.p50 <= row.first_token_ms.p50 <= row.latency_ms.p50
        assert row.model == "pocket" and row.inputs_sha256 == read_inputs(file)[1]
    again = bench(*asked, "--json")
    assert read_rows(ledger) == rows, "what the ledger has is not made again"
    assert [json.loads(line)["routing"] for line in again.stdout.splitlines()] == [row.routing for row in rows]
    bench("report", ledger, "--out", folder)
    assert latest_simulation(rows) == rows and cells(rows[0])[:3] == ["2", "10", "random"]
    page = (folder / "simulation.md").read_text()
    assert page == whole(rows) and page.count("\n| 2 |") == 6 + 2
    runs = "60 measured requests a row over 2 independent run(s)"
    assert all(reported in page for reported in (runs, rows[0].inputs_sha256[:12], "not simulated whole"))
    assert (folder / "simulation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_places_to_wait_seed_and_traffic_are_those_asked_for(fleets):
    rate = 0.6 * fleets.most(TRAFFIC)
    many, none, other = (
        simulated(fleets, "least-loaded", 4, rate, 1500, **changed) for changed in ({}, {"waiting": 0}, {"seed": 1})
    )
    # a request that is taken begins with the next pass; what comes is answered or refused
    assert none.queue_ms.p99 < 10 < 100 < many.queue_ms.p99 and none.refused > many.refused
    assert none.answered == pytest.approx((1 - none.refused) * none.asked, rel=0.06)
    assert many.latency_ms != other.latency_ms
    only = [Traffic(short_share=share) for share in (0.0, 1.0)]
    long, short = (simulated(fleets, "least-loaded", 4, 10.0, 400, traffic) for traffic in only)
    assert set(long.by_kind_ms) == {"long"} and set(short.by_kind_ms) == {"short"}
    assert short.latency_ms.p50 < long.latency_ms.p50 and fleets.most(only[1]) > fleets.most(only[0])


@pytest.mark.exhaustive
def test_groups_stand_for_a_fleet_of_any_size(fleets):
    """What a group of a large fleet sees is what a fleet of that size would: with loads known, and without."""
    rate = 0.2 * fleets.most(TRAFFIC)
    for routing in ("random", "least-loaded"):
        small, large = (simulated(fleets, routing, count, rate, 4000, group=4) for count in (4, 40000))
        assert small.latency_ms != large.latency_ms, "other groups are other draws"
        assert large.latency_ms.p50 == pytest.approx(small.latency_ms.p50, rel=0.1)
    # where chats stay with replicas that are drawn for them, nobody sees that the fleet is cut
    whole, cut = (simulated(fleets, "session-affine", 16, rate, 8000, group=group) for group in (16, 4))
    assert cut.latency_ms.p50 == pytest.approx(whole.latency_ms.p50, rel=0.05)
    assert cut.latency_ms.p95 == pytest.approx(whole.latency_ms.p95, rel=0.2)


def test_what_depths_apart_change_is_told_run_by_run(fleets):
    pair = [simulated(fleets, name, 2, 5.0, 60, runs=2, warm=10) for name in ("least-loaded", "depth-aware")]

    def changed(row, p95, drift=(1.0, 1.0)):
        tails = tuple(Tail(p50=1, p95=item, p99=9999) for item in p95)
        by_kind = {"short": tails, "long": tails[::-1]}
        return row.model_copy(update={"latency_by_run_ms": tails, "by_kind_by_run_ms": by_kind, "drift_by_run": drift})

    together, apart = changed(pair[0], (100, 200)), changed(pair[1], (50, 300))
    (line,) = apart_cells([together, apart])
    assert line[:4] == ("2", "10", "depth-aware", "least-loaded")
    # 0.5 and 1.5: their mean, and t(0.975; 1) = 12.706 times 0.5 about it, but no ratio is under 0
    assert line[4] == line[5] == line[6] == "1.00 (0.00 to 7.35)"
    assert apart_cells([apart]) == [], "there is nothing to compare with"
    growing = changed(pair[1], (50, 300), (1.5, 1.51))
    assert is_unsettled(growing) and not is_unsettled(apart) and "unsettled" in cells(growing)[6]
    assert apart_cells([together, growing])[0][3] == "least-loaded (unsettled)"
    assert is_unsettled(apart.model_copy(update={"slots": 0.97}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rates", "fast"), "--rates 'fast'"),
        (("--rates", "-1"), "a rate is a number above 0"),
        (("--replicas", "many"), "--replicas 'many'"),
        (("--replicas", "0"), "replicas must be at least 1, got 0"),
        (("--replicas", "10", "--group", "4"), "do not divide into groups of 4"),
        (("--routings", "nearest"), "no such routing: 'nearest'"),
        (("--replicas", "1"), "at least two replicas between short and long traffic, got 1"),
        (("--requests", "61"), "61 requests do not divide into 2 runs"),
        (("--requests", "2"), "fewer than 2 requests"),
        (("--warm", "-1"), "warm must be at least 0, got -1"),
        (("--waiting", "-1"), "waiting must be at least 0, got -1"),
        (("--runs", "0"), "runs must be at least 1, got 0"),
        (("--short-share", "1"), "short and long traffic"),
        (("--short-share", "2"), "short_share"),
        (("--turns", "0"), "turns"),
        (("--inputs", "nowhere.json"), "nowhere.json"),
        (("--picture", "p.gif"), "--picture 'p.gif': give a name that ends in .svg or .png"),
    ],
)
def test_bad_input_is_told_in_one_line(file, ledger, arguments, message):
    assert message in refused("simulate", "--inputs", file, "--rates", 5, "--out", ledger, *QUICK, *arguments)
    assert not ledger.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loops": 5}, "exits at loop 6 of 5"),
        ({"kinds": {}}, "kinds"),
        ({"colour": 1}, "colour"),
        ({"running": 0}, "running"),
        ({"kept": 15}, "kept must be at least 16"),
    ],
)
def test_damaged_inputs_are_refused(file, changes, message):
    file.write_text(json.dumps({**inputs_of().model_dump(mode="json"), **changes}))
    with pytest.raises(ValueError, match=message):
        read_inputs(file)


@pytest.mark.exhaustive
def test_the_committed_rows_are_of_the_committed_inputs():
    """And some of them come out again, digit for digit, but for what rounding of another machine may change."""
    inputs, digest = read_inputs(RESULTS / "simulation-inputs.json")
    rows = latest_simulation(read_rows(LEDGER))
    assert {row.inputs_sha256 for row in rows} == {digest}
    assert {row.routing for row in rows} == set(COMPARED.split(",")) and max(row.replicas for row in rows) == 10240
    assert (RESULTS / "simulation.md").read_text() == whole(rows)
    for check in inputs.checks:
        # median and 95th percentile at loads of which nothing was fitted; text and page say how far they are off
        assert check.off < 0.15
    fleets = Fleets(inputs, digest)
    for row in (row for row in rows if row.replicas == 16 and row.routing in ("fleet", "session-affine")):
        traffic = Traffic(**{**row.traffic, "context": int(row.traffic["context"])})
        sizes = {name: getattr(row, name) for name in SIMULATION_SIZES}
        again = simulate(fleets, Setting(row.routing, rate=row.rate, traffic=traffic, **sizes))
        assert again.key == row.key
        assert not list(differences(row.model_dump(mode="json"), again.model_dump(mode="json")))
