import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.desk import Desk
from sigma0.reason.lemma import FINAL, ExhaustiveSearcher, GateRefused, Lemma, LemmaSettings, boxed, is_counting
from sigma0.reason.lemma.counting import claimed, same_number
from sigma0.reason.lemma.running import objection_to
from sigma0.reason.sandbox.sandbox import RunResult
from sigma0.reason.trail import Run, Trail
from tests.reason.lemma.helpers import SubprocessRunner

PAIRS = Lemma("L1", "How many pairs of 1 to 4 have an even sum?", "computational")
ENUMERATES = "found = [(a, b) for a in range(1, 5) for b in range(a + 1, 5) if (a + b) % 2 == 0]\nresult = len(found)\n"
RULE = "assert all(sum(pair) % 2 == 0 for pair in found)\n"


def search(code, lemma=PAIRS, proof=""):
    trail = Trail()
    searcher = ExhaustiveSearcher(SubprocessRunner(), Desk(trail, seed=3), LemmaSettings())
    return searcher.search(lemma, proof, code, "check L1, attempt 1"), trail


def test_the_executed_value_is_the_value_whatever_is_printed_or_claimed():
    obtained, trail = search(ENUMERATES + RULE)
    assert (obtained.value, obtained.objection, dict(obtained.overruled)) == ("2", None, {})
    assert isinstance(trail.lines[0], Run)
    obtained, _ = search(
        "print('result 9')\nprint(9)\n" + ENUMERATES + RULE + "def print(*_): pass\ndef str(_): return '9'\n"
    )
    assert obtained.value == "2"
    lemma = Lemma("L1", "The number of pairs of four cards with an even sum is 3.")
    obtained, _ = search(ENUMERATES + RULE, lemma)
    assert obtained.value == "2" and dict(obtained.overruled) == {"statement": "3"}


@pytest.mark.parametrize(
    "estimate",
    [
        "assert result == 3",
        "assert 3 == result, 'three'",
        "expected = 3\nassert result == expected",
        "assert len(found) == 3",
        "assert result == 3 and all(found)",
    ],
)
def test_an_estimate_is_taken_out_and_overruled(estimate):
    obtained, trail = search(ENUMERATES + RULE + estimate, proof="So it is \\boxed{3}.")
    assert obtained.value == "2" and obtained.overruled["proof"] == "3"
    assert obtained.overruled.get("code", "3") == "3"
    kept = [ast.unparse(node) for node in ast.walk(ast.parse(trail.lines[0].code)) if isinstance(node, ast.Assert)]
    assert not any("3" in test or "expected" in test for test in kept)
    assert trail.lines[0].result["assertions_run"] == 1 + ("all(found)" in estimate)


def test_an_assertion_on_a_small_case_or_a_formula_is_no_estimate():
    code = (
        "from math import comb\n"
        "def count(n):\n"
        "    return sum(1 for a in range(1, n + 1) for b in range(a + 1, n + 1) if (a + b) % 2 == 0)\n"
        "assert count(3) == 1\nresult = count(4)\nassert result == 2 * comb(2, 2)\n"
    )
    obtained, trail = search(code)
    assert obtained.value == "2" and trail.lines[0].result["assertions_held"] == 2


@pytest.mark.parametrize(
    "code, output",
    [
        (ENUMERATES, "holds no assertion"),
        (ENUMERATES + "assert 1 == 1", "no assertion mentions anything computed"),
        (ENUMERATES + "assert result == 3", "merely compare `result` with a number"),
        (ENUMERATES + "assert 0 < result < 9", "merely compare"),
        (ENUMERATES + "assert result", "merely compare"),
        (ENUMERATES + "count = result\nassert result == 3 and len(found) == 3", "merely compare"),
        ("n = 4\nresult = n * 3 // 6\nassert n * 2 == 8", "comes of no enumeration"),
        ("from math import comb\nresult = comb(4, 2)\nassert comb(4, 1) == 4", "comes of no enumeration"),
        (ENUMERATES + RULE + "result = 3", "comes of no enumeration"),
        ("for n in range(4):\n    result = 3\nassert sum(range(4)) == 6", "comes of no enumeration"),
        (
            "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nresult = f(4)\nassert f(3) == 6",
            "comes of no enumeration",
        ),
        ("total = sum(1 for n in range(4))\nassert total == 4", "does not bind `result`"),
        (
            "def main():\n    result = sum(1 for n in range(4))\n    assert result == 4\nmain()",
            "does not bind `result`",
        ),
        ("found = [n for n in range(7)]\nresult = len(found)\nassert max(found) == 6", "none of the numbers"),
    ],
)
def test_code_that_does_not_enumerate_or_asserts_nothing_is_refused(code, output):
    with pytest.raises(GateRefused, match=output):
        search(code)


@pytest.mark.parametrize(
    "tail, output",
    [
        ("assert sum(found[0]) % 2 == 1", "1 of 2 assertions did not hold"),
        ("result = result / 2", "exit code 1"),
        ("result = result == 2", "a truth value, no whole number"),
        ("raise SystemExit(0)", "`result` could not be read"),
    ],
)
def test_a_run_that_goes_wrong_gives_no_value(tail, output):
    obtained, _ = search(ENUMERATES + RULE + tail)
    assert obtained.value is None and output in obtained.objection


@pytest.mark.parametrize(
    "statement, kind, strategy, counts",
    [
        ("How many primes are below 100?", "structural", "", True),
        ("The number of edges is even.", "structural", "", True),
        ("Count the derangements of four letters.", "structural", "", True),
        ("The largest prime below 100.", "computational", "enumerate all below 100", True),
        ("The largest prime below 100.", "structural", "enumerate all below 100", False),
        ("The account of this country grows.", "computational", "compute it", False),
    ],
)
def test_counting_lemmas_are_told_by_their_words(statement, kind, strategy, counts):
    lemma = Lemma("L1", statement, kind, verification_strategy=strategy)
    assert is_counting(lemma, "How many are there?") is counts
    for problem, final in (("How many are there?", True), ("What is twice L1?", False)):
        assert is_counting(Lemma(FINAL, "The answer is twice L1."), problem) is final


@pytest.mark.parametrize(
    "statement, claim",
    [
        ("The number of pairs is 1,200.", "1200"),
        ("There are exactly 12 such pairs among 5 cards.", "12"),
        ("The count of n with n mod 7 = 3", "3"),
        ("How many n have n mod 7 = 3?", None),
        ("Count the n for which n mod 7 = 3.", None),
        ("The number of pairs among 5 cards.", None),
    ],
)
def test_claims_of_a_statement(statement, claim):
    assert claimed(statement) == claim
    for number in ("12", "**12**", "$12$.", "\\boxed{12}", "$\\boxed{12}$."):
        assert claimed(f"The number of ways is {number}") == "12"


@given(st.integers(-(10**12), 10**12))
def test_a_number_is_itself_with_commas_and_signs_around_it(number):
    assert same_number(f"${number:,}$", str(number))
    assert same_number(f"{number} \\text{{ ways}}", str(number))
    assert not same_number(f"{number + 1}", str(number))


@pytest.mark.parametrize(
    "code",
    [
        "from itertools import combinations as pairs\n"
        "result = len([1 for pair in pairs(range(1, 5), 2) if sum(pair) % 2 == 0])",
        "import itertools\n"
        "result = len(list(filter(lambda pair: sum(pair) % 2 == 0, itertools.combinations(range(1, 5), 2))))",
        "result = 0\nfor a in range(1, 5):\n    for b in range(1, a):\n        if (a + b) % 2 == 0:\n"
        "            result += 1",
        "hits = []\ndef go(a, b):\n    if b == 5:\n        return\n    if (a + b) % 2 == 0:\n"
        "        hits.append((a, b))\n    go(a, b + 1)\nfor a in range(1, 5):\n    go(a, a + 1)\nresult = len(hits)",
        "def count():\n    n = 0\n    for a in range(1, 5):\n        for b in range(1, a):\n"
        "            n += (a + b) % 2 == 0\n    return n\nresult = count()",
        "class Search:\n    def run(self):\n        self.found = 0\n        for a in range(1, 5):\n"
        "            self.found += sum(1 for b in range(1, a) if (a + b) % 2 == 0)\n        return self.found\n"
        "result = Search().run()",
        "def f(n):\n    return 1 if n < 2 else f(n - 1) + f(n - 2)\nresult = f(2)",
    ],
    ids=["combinations", "a filter", "loops", "a recursion", "a function", "a class", "branches"],
)
def test_many_ways_to_enumerate_count(code):
    obtained, _ = search(code + "\nassert sum(range(4)) == 6\n")
    assert obtained.value == "2"


def result(ok=True, stderr="", exit_code=0, timed_out=False, run=2, held=2, cut=None):
    return RunResult(ok, "", stderr, exit_code, timed_out, run, 0.1, assertions_held=held, cut=cut)


@pytest.mark.parametrize(
    "obtained, output",
    [
        (result(run=0, held=0), "no assertion was reached"),
        (
            result(False, "Traceback\nAssertionError: six", 1, held=1),
            "1 of 2 assertions did not hold: AssertionError: six",
        ),
        (result(False, "Traceback\nOSError: no disk\n", 1), "exit code 1: OSError: no disk"),
        (result(False, "", None), "it gave no reason"),
        (result(False, exit_code=None, cut="output"), "the limit of output"),
        (result(False, exit_code=None, cut="memory"), "more than 512 MB"),
        (result(cut="output"), "the limit of output"),
    ],
)
def test_every_run_but_one_whose_assertions_held_has_an_objection(obtained, output):
    assert output in objection_to(obtained, LemmaSettings()) and objection_to(result(), LemmaSettings()) is None


plain = st.text(alphabet="ab1 +^_", max_size=6)
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner | inner.map(lambda text: "{" + text + "}"), max_size=4).map("".join),
    max_leaves=8,
)


@given(nested, st.text(max_size=20).filter(lambda text: "boxed" not in text), nested.filter(str.strip))
def test_the_last_box_is_read_whatever_braces_it_holds(first, between, last):
    assert boxed(f"\\boxed{{{first}}} {between} \\boxed{{{last}}} so it is }}") == last.strip()


@given(st.text(alphabet="\\boxed{} 1", max_size=60))
def test_any_text_can_be_read(text):
    result = boxed(text)
    assert result is None or (result in text and result == result.strip() != "")


@pytest.mark.parametrize(
    "text, answer",
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\}}", "\\}"),
        ("\\boxed{}", None),
        ("42", None),
        ("\\boxed{" + "x" * 2000 + "}", None),
    ],
)
def test_boxes_are_read(text, answer):
    assert boxed(text) == answer
