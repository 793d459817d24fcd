import ast
import builtins

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.sandbox import inside
from sigma0.reason.sandbox.inside import counted


def counts_of(code, **names):
    """Reached and held, by running the counted program here."""
    counts = [0, 0]
    namespace = {"__builtins__": {**vars(builtins), inside._COUNTS: counts}, **names}
    exec(compile(counted(ast.parse(code)), "program", "exec"), namespace)
    return counts


@pytest.mark.filterwarnings("ignore:assertion is always true")
@pytest.mark.parametrize(
    "test", ["True", "1", "'text'", "None", "(1, 'message')", "[1, {2: 3}]", "-1", "...", "b'x'", "__debug__"]
)
def test_a_bare_constant_is_not_counted(test):
    assert counts_of(f"try:\n    assert {test}\nexcept AssertionError:\n    pass") == [0, 0]


@pytest.mark.filterwarnings("ignore:assertion is always true")
@pytest.mark.parametrize(
    "code",
    [
        *map("assert {}".format, ["x", "not False", "1 == 1", "(x, 'message')", "f'{x}'", "[x]", "len('a')"]),
        "if x:\n    assert x",
        "if not x:\n    pass\nelif x:\n    assert x",
        "for _ in [1]:\n    pass\nelse:\n    assert x",
        "while True:\n    assert x\n    break",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    assert x",
        "try:\n    pass\nexcept ValueError:\n    pass\nelse:\n    assert x",
        "try:\n    pass\nfinally:\n    assert x",
        "import contextlib\nwith contextlib.nullcontext():\n    assert x",
        "match x:\n    case 1:\n        assert x",
        "class C:\n    assert x",
        "class C:\n    def __private(self):\n        assert x\n    def f(self):\n        self.__private()\nC().f()",
        "def f():\n    assert x\nf()",
        "def f():\n    yield 1\n    assert x\nlist(f())",
        "import asyncio\nasync def f():\n    assert x\nasyncio.run(f())",
        "if x: assert x; y = 1",
    ],
)
def test_any_other_assertion_is_counted_wherever_it_stands(code):
    assert counts_of(code, x=1) == [1, 1]


def test_an_assertion_that_raises_is_reached_in_vain_and_deep_expressions_are_walked():
    assert counts_of("try:\n    assert 1 / x\nexcept ZeroDivisionError:\n    pass", x=0) == [1, 0]
    counted(ast.parse("assert " + "+".join(["1"] * 500)))
    counted(ast.parse("assert x" + ".y" * 80 + "\n" + "if x:\n" + " assert x"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_counts_are_of_what_was_reached_and_what_held(pairs):
    lines = [f"try:\n    assert x + {left} == x + {right}\nexcept AssertionError:\n    pass" for left, right in pairs]
    held = sum(left == right for left, right in pairs)
    assert counts_of("\n".join(lines), x=1) == [len(pairs), held]


@given(st.integers(0, 30), st.integers(0, 30))
def test_counting_stops_where_the_program_does(times, fails_at):
    loop = "for number in range(times):\n        assert number != fails_at"
    code = f"try:\n    {loop}\nexcept AssertionError:\n    pass"
    counts = [fails_at + 1, fails_at] if fails_at < times else [times, times]
    assert counts_of(code, times=times, fails_at=fails_at) == counts


def test_lines_stay_where_they_were():
    code = "x = 1\nassert x\nassert (\n    x ==\n    2\n)\n"
    lines = [
        [(node.lineno, node.end_lineno) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        for tree in (ast.parse(code), counted(ast.parse(code)))
    ]
    assert lines[0] == lines[1] != []
