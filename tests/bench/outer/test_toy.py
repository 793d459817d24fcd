"""The small repository passes its tests, fails them with each fault, and is what the agent's bench works on."""

import json
import random
import shutil
import subprocess
import sys

import pytest

from sigma0.bench.outer.command import _by_lot
from sigma0.bench.outer.toy import FAULTS, TOYS, is_held_out, planted, write
from sigma0.reason.agent import choices
from tests.bench.running import bench


def passes(folder):
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    return subprocess.run(line, cwd=folder, capture_output=True, timeout=120).returncode == 0


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: "none" if fault is None else fault.name)
def test_its_tests_pass_without_a_fault_and_fail_with_each(fault, tmp_path):
    write(tmp_path, fault)
    assert passes(tmp_path) == (fault is None)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_command_counts_what_was_mended(ledger):
    result = bench("agent", "pocket", "--steps", 4, "--max-tokens", 16, "--out", ledger)
    assert f"0 of {len(FAULTS)} faults mended" in result.output
    row = json.loads(ledger.read_text())
    assert (row["n"], row["right"]["value"], row["way"]) == (len(FAULTS), 0, "agent, held to actions, 4 steps")


def test_every_change_of_a_toy_is_seen_by_its_test_and_can_be_taken_back():
    def result(toy, returns, given):
        return repr(eval(f"(lambda {toy.takes}: {returns})({given})"))

    lines = []
    for toy in (toy for toys in TOYS.values() for toy in toys):
        assert all(result(toy, toy.returns, given) == expected for given, expected in toy.calls)
        for edit in choices.edits_of("a.py", toy.line):
            returns = edit.new.partition("return ")[2]
            assert any(result(toy, returns, given) != expected for given, expected in toy.calls), edit.new
            assert toy.line in [back.new for back in choices.edits_of("a.py", edit.new)]
            lines.append(edit.new)
    assert 8 <= sum(map(is_held_out, lines)) <= len(lines) // 3 and len(lines) == 44


def test_drawn_repositories_hold_one_fault_of_their_kind():
    for held_out in (True, False):
        for index in range(40):
            toys = planted(0, index, held_out)
            assert is_held_out(toys.mend.old) == held_out and toys.mend.new == toys.toy.line
            assert toys.files[toys.mend.path].count(toys.mend.old) == 1 and toys.toy.line in toys.mended
            assert toys == planted(0, index, held_out) != planted(0, index + 1, held_out)
            tests = toys.files[f"test_{toys.mend.path}"]
            assert f"test_{toys.toy.name}()" in tests and f"import {toys.toy.name}" in tests.replace(", ", "\nimport ")


def test_chance_chooses_among_the_listed_actions():
    listed = choices.actions(["a.py"], ("a.py", "def add(a, b): return a + b\n"))
    reply = _by_lot(random.Random(0))
    drawn = {reply(messages=[], grammar=choices.choice_grammar(listed)) for _ in range(200)}
    assert drawn == {choices.written(action) for action in listed} and len(listed) == 7
