"""Mutants of a tiny tree under its tests."""

import time

import pytest

pytest.importorskip("cosmic_ray")
pytest.importorskip("coverage")

from sigma0.bench.core.rows_tests import MutationScore
from sigma0.bench.mutation.campaign import Area, Campaign, nearest, scores, test_files
from sigma0.bench.mutation.covering import CoverageCache
from sigma0.bench.mutation.mutants import mutate, places
from sigma0.bench.mutation.reasons import Equivalent, Reasons, survivors
from sigma0.bench.mutation.workers import TestWorker, copy_tree, spread
from tests.bench.mutation.tiny import SOURCE, write_tree

pytestmark = pytest.mark.slow

test_files.__test__ = False
FILE, TEST_FILE = "sigma0/decode/tiny.py", "tests/decode/test_tiny.py"
AREAS = {"decode": Area(("sigma0/decode",), ("tests/decode",))}


def mutant(after):
    """The first mutant of the tiny source with this line."""
    found = [(change, line) for ((line, _), _), changes in places(SOURCE).items() for change in changes]
    mutants = (mutate(FILE, SOURCE, change, line) for change, line in found)
    return next(each for each in mutants if each is not None and " ".join(each.after.split()) == after)


KILLED = mutant("return first if first < second else second")
SURVIVES = mutant("return first if first >= second else second")
HANGS = mutant("number -= 0")
NOT_RUN = mutant("return number - 5")
AT_THE_TOP = mutant("STEP = 2")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("mutants") / "tree")


@pytest.fixture(scope="module")
def worker(tree):
    with TestWorker(*copy_tree(tree, tree.with_name("copies"), 1)) as started:
        yield started


@pytest.fixture(scope="module")
def cache(tree, worker):
    found = CoverageCache(tree.with_name("known"), tree)
    assert found.stale([TEST_FILE]) == [TEST_FILE]
    found.cover(worker, TEST_FILE, ["sigma0/decode/*"])
    return found


def judge(tree, worker, cache, mutants, minutes=1.0):
    end = time.monotonic() + 60 * minutes
    campaign = Campaign([worker], tree, AREAS, cache, 60.0, end, end, start=5.0)
    done = []
    judged = campaign.judge({"decode": mutants}, done.append)
    assert done == list(range(1, 1 + sum(each.outcome != "not reached" for each in judged)))
    return judged


@pytest.mark.exhaustive
def test_killed_survived_hung_and_not_run(tree, worker, cache):
    judged = judge(tree, worker, cache, [KILLED, SURVIVES, HANGS, NOT_RUN, AT_THE_TOP])
    assert [each.outcome for each in judged] == ["killed", "survived", "timed out", "survived", "survived"]
    assert [each.tests for each in judged] == [3, 3, 1, 0, 4]
    assert judged[0].by == f"{TEST_FILE}::test_larger" or judged[0].by.startswith(TEST_FILE)
    reasons = Reasons((Equivalent(file=FILE, before=SURVIVES.before, after=SURVIVES.after, reason="they are equal"),))
    assert scores(judged, reasons.of) == {"decode": MutationScore(killed=2, by_time=1, survived=2, equivalent=1)}
    assert scores(judged, reasons.of)["decode"].share == 0.5
    listed = {each.after: (each.tests, each.reason) for each in survivors(judged, reasons)}
    assert listed == {
        SURVIVES.after: (3, "they are equal"), NOT_RUN.after: (0, None), AT_THE_TOP.after: (4, None)
    }  # fmt: skip


def test_what_the_time_does_not_suffice_for_is_told(tree, worker, cache):
    assert [each.outcome for each in judge(tree, worker, cache, [KILLED, SURVIVES], minutes=0.0)] == ["not reached"] * 2


def test_neither_tree_is_left_changed(tree, worker, cache):
    judge(tree, worker, cache, [KILLED])
    assert (tree / FILE).read_text() == (worker.copy / FILE).read_text() == SOURCE
    assert (worker.copy / "sigma0/bench").is_symlink() and (worker.copy / "sigma0/bench").readlink().name == "bench"


def test_tests_of_a_shared_fixture_run_its_lines_and_failing_tests_do_not_count(cache):
    covered = cache.covered([TEST_FILE])
    lines = KILLED.scope.statement
    assert {test.name.split("::")[1] for test in covered.of_lines(FILE, lines)} == {
        "test_larger", "test_shared", "test_of_the_same_fixture"
    }  # fmt: skip
    assert covered.failed == [f"{TEST_FILE}::test_that_fails"]


def test_the_nearest_come_first_and_no_more_than_the_time(cache):
    covered = cache.covered([TEST_FILE])
    whole = nearest(KILLED, AREAS["decode"], covered, 60.0)
    assert [test.seconds for test in whole] == sorted(test.seconds for test in whole) and len(whole) == 3
    assert nearest(KILLED, AREAS["decode"], covered, 0.0) == whole[:1], "one test runs whatever it takes"


def test_what_is_known_is_known_until_a_source_changes(tree, cache):
    assert cache.stale([TEST_FILE]) == []
    (tree / FILE).write_text(SOURCE + "\n")
    try:
        assert cache.stale([TEST_FILE]) == [TEST_FILE]
    finally:
        (tree / FILE).write_text(SOURCE)
    assert test_files(tree, AREAS) == [TEST_FILE]


def test_copies_are_alike(tree, tmp_path):
    first, second = copy_tree(tree, tmp_path, 2)
    for copy in (first, second):
        assert (copy / FILE).read_text() == SOURCE and (copy / "sigma0/bench").is_symlink()
    compiled = [sorted((copy / "sigma0/decode/__pycache__").iterdir()) for copy in (first, second)]
    assert [path.name for path in compiled[0]] == [path.name for path in compiled[1]]
    assert [path.read_bytes() for path in compiled[0]] == [path.read_bytes() for path in compiled[1]]


@pytest.mark.exhaustive
def test_errors_of_workers_are_raised():
    def work(worker, item):
        raise ValueError(f"no {item}")

    with pytest.raises(ValueError, match="no 1"):
        spread([None], [1, 2], work, time.monotonic() + 60)
    seen = []
    assert spread([None], [1, 2], lambda worker, item: seen.append(item), time.monotonic() + 60) == []
    assert seen == [1, 2]
