import json

import pytest

from sigma0.bench.humaneval.judging import Judgement, Limits, judge, judgement
from sigma0.reason.sandbox.sandbox import RunResult, Sandbox
from tests.bench.humaneval.examples import DOUBLE, PROBLEMS
from tests.reason.sandbox.sandboxes import needs_bubblewrap

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
