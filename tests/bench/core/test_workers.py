"""Items over workers: kept, resumed, and done again once where a worker dies. Ray is started for the slow ones."""

import contextlib
import json
import os
from collections import Counter
from ipaddress import ip_address

import psutil
import pytest

from sigma0.bench.core.workers import KeptResults, WorkerLost, check_room, key_of, worker_pool
from tests.bench.core.worker_items import Here, logged


def items_of(folder, count, **changes):
    return [{"number": number, "log": str(folder / "log"), **changes.get(str(number), {})} for number in range(count)]


def calls(folder):
    return Counter(map(int, (folder / "log").read_text().split()))


def test_results_are_kept_and_found_again(tmp_path):
    items, path = items_of(tmp_path, 5), tmp_path / "work.jsonl"
    with KeptResults(path) as kept:
        first = Here(1).spread(logged, items[:3], kept)
    output = []
    with KeptResults(path) as kept:
        result = Here(1).spread(logged, items, kept, output.append)
    assert result[:3] == first and [entry["twice"] for entry in result] == [0, 2, 4, 6, 8]
    assert set(calls(tmp_path).values()) == {1} and output == [3, 4, 5]
    assert result[1]["third"] == 1 / 3, "every digit is kept"


def test_a_run_that_breaks_off_goes_on(tmp_path):
    items, path = items_of(tmp_path, 6, **{"4": {"fails": True}}), tmp_path / "work.jsonl"
    with pytest.raises(ValueError, match="4 is no good"), KeptResults(path) as kept:
        Here(1).spread(logged, items, kept)
    assert sorted(calls(tmp_path)) == [0, 1, 2, 3, 4]
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote the last line
    with KeptResults(path) as kept:
        result = Here(1).spread(logged, items_of(tmp_path, 6), kept)
        kept.forget()
    assert [entry["twice"] for entry in result] == [0, 2, 4, 6, 8, 10]
    assert calls(tmp_path) == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 1}
    assert not path.exists()


def test_another_item_is_another_name():
    item = {"number": 1, "log": "a"}
    assert key_of(logged, item) == key_of(logged, dict(reversed(item.items())))
    assert len({key_of(logged, item), key_of(logged, {**item, "number": 2}), key_of(items_of, item)}) == 3


def test_damaged_results_are_refused(tmp_path):
    path = tmp_path / "work.jsonl"
    path.write_text('{"key": "a", "result": 1}\n{"key": "b"}\n')
    with pytest.raises(ValueError, match=r"line 2 .* is no result"), KeptResults(path):
        pass
    path.unlink()
    with KeptResults(path), pytest.raises(ValueError, match="another run keeps its results"), KeptResults(path):
        pass
    with KeptResults(path):
        pass


def test_no_worker_is_refused():
    with pytest.raises(ValueError, match="at least one worker"), worker_pool(0):
        pass


def test_what_no_machine_has_is_refused():
    machines = [{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}, {}]
    for cpus, gpus in [(4, 0), (2, 1), (1, 0)]:
        check_room(machines, cpus, gpus)
    for cpus, gpus in [(5, 0), (3, 1), (1, 2)]:
        with pytest.raises(ValueError, match=f"takes {cpus} CPUs and {gpus} GPUs"):
            check_room(machines, cpus, gpus)


@pytest.mark.exhaustive
def test_workers_share_the_items_and_a_killed_ones_are_done_again_once(tmp_path, monkeypatch):
    """One of them kills its worker the first time; each result is kept once, and nothing listens to other machines."""
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    path = tmp_path / "work.jsonl"
    items = items_of(tmp_path, 12, **{"5": {"dies": str(tmp_path / "died"), "dies_once": True}})
    # another test's processes, such as the server that forks for `tests.processes`
    others = psutil.Process().children(recursive=True)
    with worker_pool(2) as pool, KeptResults(path) as kept:
        result = pool.spread(logged, items, kept)
        family = [child for child in psutil.Process().children(recursive=True) if child not in others]
        sockets = []
        for child in family:
            # the worker that was killed may be gone by now, and so may Ray's helpers
            with contextlib.suppress(psutil.NoSuchProcess):
                sockets += child.net_connections("inet")
        listening = {ip_address(entry.laddr.ip) for entry in sockets if entry.status == psutil.CONN_LISTEN}
        assert listening and all((getattr(entry, "ipv4_mapped", None) or entry).is_loopback for entry in listening)
        failing = items_of(tmp_path, 1, **{"0": {"fails": True}})
        with pytest.raises(ValueError, match=r"^0 is no good$"):
            pool.spread(logged, failing)
        hopeless = items_of(tmp_path, 3, **{"1": {"dies": str(tmp_path / "never"), "dies_once": False}})
        with pytest.raises(WorkerLost, match="over the same item 2 times"):
            pool.spread(logged, hopeless)
    assert [entry["twice"] for entry in result] == [2 * number for number in range(12)]
    assert len({entry["pid"] for entry in result}) >= 2 and os.getpid() not in {entry["pid"] for entry in result}
    assert pool.redone == 2, "once for the item that was saved, once for the hopeless one"
    lines = [json.loads(line)["result"]["twice"] for line in path.read_text().splitlines()]
    assert sorted(lines) == [2 * number for number in range(12)], "counted once"
    assert calls(tmp_path)[5] == 2
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "Ray's processes end with the pool"
