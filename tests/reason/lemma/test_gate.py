import ast
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.lemma import GateRefused, Program
from sigma0.reason.lemma.gate import MAX_CODE, fenced_code, numbers_in, refuse_without_numbers

literals = st.sampled_from(["5", "-3", "2.5", "'a'", "True", "None", "x", "y", "[1, 2]", "(1, x)", "{'a': 1}", "zs[0]"])
literal_tests = st.recursive(
    literals,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["==", "!=", "<", "in", "is not", "and", "or"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        inner.map(lambda text: f"(not {text})"),
        inner.map(lambda text: f"(5 if {text} else 6)"),
        inner.map(lambda text: f"bool({text})"),
        inner.map(lambda text: f"isinstance({text}, int)"),
        st.tuples(inner, inner).map(lambda parts: f"[{', '.join(parts)}]"),
        inner.map(lambda text: f"same({text})"),
        inner.map(lambda text: f"five({text})"),
    ),
    max_leaves=6,
)


LITERALS = """
x = 5
y = z = x
zs = [1, 2]
def same(value):
    return value
five = lambda value: 5
if x == 5:
    y = 6
"""


@given(literal_tests)
def test_a_test_of_literals_says_something_as_soon_as_a_computation_must_hold(test):
    assert Program(f"{LITERALS}\nassert {test}").meaningful == []
    # computations that cannot matter
    code = f"{LITERALS}\nassert ({test}) or f()\nassert f() or ({test})\nassert True or f()"
    assert Program(code).meaningful == []
    assert len(Program(f"{LITERALS}\nassert ({test}) and sum([1, 2]) == 3").meaningful) == 1


@pytest.mark.parametrize(
    "code",
    [
        "x = 5\nassert x == 5",
        "x = f()\nassert x == x",
        "x = f()\nx = 5\nassert x == 5",
        "assert (f() == 5, 'a message')",
        "assert (n > 0 for n in f())",
        "assert f'{f()}'",
        "def f():\n    return 5\nassert f() == 5",
        "def check(n):\n    assert n == 5\ncheck(5)",
        "assert f",
        "import math\nassert math.pi > 3",
        "for n in range(3):\n    x = 5\nassert x == 5",
        "assert not (False and f())",
        "xs = [1, 2]\nprint(xs)\nassert xs == [1, 2]",
        "class A:\n    n = 5\nassert A.n == 5",
        "assert (x := 5) == 5",
        "assert f() if False else True",
        "assert isinstance(f(), int)",
        "assert all([True, True])",
    ],
)
def test_assertions_that_say_nothing(code):
    assert Program(code).meaningful == []


@pytest.mark.parametrize(
    "code",
    [
        "assert 2 + 2 == 4",
        "assert sum(range(4)) == 6",
        "assert {n for n in 'ab'} == {'a', 'b'}",
        "for n in (1, 2):\n    assert n < 3",
        "t = 0\nfor n in range(3):\n    t += n\nassert t == 3",
        "ok = True\nfor n in range(3):\n    ok = ok and n < 3\nassert ok",
        "found = False\nfor n in range(3):\n    if n == 2:\n        found = True\nassert found",
        "xs = []\nfor n in range(3):\n    xs.append(1)\nassert xs == [1, 1, 1]",
        "c = {}\nfor sign in 'ab':\n    c[sign] = 1\nassert c == {'a': 1, 'b': 1}",
        "def odd(n):\n    while n > 1:\n        n -= 2\n    return n == 1\nassert odd(7)",
        "def odd(n):\n    if n % 2:\n        return True\n    return False\nassert odd(7)",
        "def main():\n    t = sum(range(3))\n    assert t == 3\nmain()",
        "def check(a, b):\n    assert a == b\ncheck(2 * 3, 6)",
        "def fill(g):\n    g.append(1)\nxs = []\nfill(xs)\nassert xs == [1]",
        "try:\n    v = int(f())\n    ok = False\nexcept ValueError:\n    ok = True\nassert ok",
        "assert not f(3) == 4",
        "n, steps = 8, 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n\n    steps += 1\nassert steps == 3",
        "def g():\n    yield 1\nassert list(g()) == [1]",
        "assert max(3, 4) == 4",
        "s = 'racecar'\nassert s == s[::-1]",
        "class T:\n    n = 0\nfor i in range(10):\n    T.n += i\nassert T.n == 45",
        "x, y = 3, 4\nassert abs(x - y) == 1",
    ],
)
def test_assertions_that_say_something(code):
    program = Program(code)
    assert len(program.meaningful) == 1 and program.vacuous == []


def test_vacuous_assertions_go_and_numbers_of_code_are_those_it_uses():
    program = Program("x = 5\nassert print(x) is None, 'why'\nassert sum([x]) == 5")
    code = program.with_tests(dict.fromkeys(program.vacuous))
    assert code == "x = 5\nprint(x) is None\nassert sum([x]) == 5"
    code = '"""All 77 cases."""\nx = 1_000\ny = [0.1, 1e3]\nassert f("12 and 13") == x, "not 99"\nassert True is not 55'
    program = Program(code)
    assert program.numbers(program.vacuous) == {1000, Fraction(1, 10), 12, 13}
    assert Fraction(6) in Program("xs = list(range(1, 7))").numbers()
    assert Fraction(9) in Program("xs = list(range(10))").numbers()
    refuse_without_numbers({Fraction(1000), Fraction(3)}, numbers_in("1,000 of 5"))
    refuse_without_numbers(set(), numbers_in("no numbers here"))
    with pytest.raises(GateRefused, match=r"none of the numbers of the statement \(0.5, 1000\): check it with"):
        refuse_without_numbers({Fraction(3)}, numbers_in("1,000 times 0.5"))


@pytest.mark.parametrize(
    "code, output",
    [
        ("assert (", "no Python, line 1"),
        ("x = '\0'", "code"),
        ("x = '\ud800'", "cannot be read"),
        ("(" * 5000 + ")" * 5000, "no Python|deeply"),
        ("-" * 15000 + "1", "nested too deeply"),
        ("+".join(["1"] * 9000), "nested too deeply"),
        ("x = " + "9" * 6000, "digits"),
        ("#" * (MAX_CODE + 1), "longer than 20000 characters"),
        ("\n".join(f"a{n} = a{n + 1}" for n in range(1300)), None),
        ("\n".join(f"a{n} = a{n + 1}" for n in range(1300)) + "\na1300 = f()", "too many steps"),
    ],
)
def test_code_that_cannot_be_looked_at_is_refused(code, output):
    if output is None:
        assert Program(code).assertions == []
    else:
        with pytest.raises(GateRefused, match=output) as error:
            Program(code)
        assert len(str(error.value)) < 300


@given(st.text(max_size=80) | st.text(alphabet="assert x=5()[]{}:\n iforwhle.,'", max_size=120))
def test_any_code_is_looked_at_or_refused(code):
    try:
        program = Program(code)
    except GateRefused:
        return
    assert len(program.meaningful) + len(program.vacuous) == len(program.assertions)
    ast.parse(program.with_tests(dict.fromkeys(program.vacuous)))


@pytest.mark.parametrize(
    "text, result",
    [
        ("1,000 and 1000", {1000}),
        ("the set 1, 2,3", {1, 2, 3}),
        ("By L1 and x2, 7.5 of 12", {Fraction(15, 2), 12}),
        ("3x + 4 = 10.", {3, 4, 10}),
        ("$5 or 50%", {5, 50}),
        ("none", set()),
        ("9" * 400, set()),
    ],
)
def test_numbers_of_a_text(text, result):
    assert numbers_in(text) == result


@pytest.mark.parametrize(
    "text, output",
    [
        ("assert 1 + 1 == 2", "holds no code block"),
        ("```python\nx = 1\n```\nor\n```python\nx = 2\n```", "holds 2 code blocks"),
        ("```python\nx = 1", "is not closed"),
        ("```c\nint x;\n```", "is in 'c'"),
    ],
)
def test_code_comes_out_of_its_fence_and_an_answer_without_one_block_of_python_is_refused(text, output):
    for language in ("python", "py", "Python", "", "python3"):
        assert fenced_code(f"So:\n```{language}\nx = 1\n\ny = 2\n```\nDone.") == "x = 1\n\ny = 2\n"
    with pytest.raises(GateRefused, match=output):
        fenced_code(text)


@pytest.mark.parametrize(
    "test", ["abs(x - 5) < 1e-9", "abs(5 - x) <= 0.001", "x - 5 == 0", "math.isclose(x, 5)", "not x - 4 == 0"]
)
def test_a_comparison_within_a_tolerance_says_as_little_as_one_without(test):
    assert Program(f"import math\nx = 5\nassert {test}").meaningful == []
    assert Program(f"import math\nx = sum([2, 3])\nassert {test}").vacuous == []
