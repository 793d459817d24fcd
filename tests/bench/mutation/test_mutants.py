"""What is mutated, what is not, and the draw."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")

from sigma0.bench.mutation.logic import Source
from sigma0.bench.mutation.mutants import mutate, places, sample
from sigma0.bench.mutation.reasons import read_equivalents
from tests.bench.mutation.tiny import SOURCE, write_tree

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FILE = "sigma0/decode/tiny.py"


def all_mutants(text):
    found = [(change, line) for ((line, _), _), changes in places(text).items() for change in changes]
    return [mutant for change, line in found if (mutant := mutate(FILE, text, change, line)) is not None]


def test_only_logic_is_mutated():
    lines = {mutant.line for mutant in all_mutants(SOURCE)}
    numbered = dict(enumerate(SOURCE.splitlines(), start=1))
    assert {numbered[line].strip() for line in lines} == {
        "STEP = 1", "if first is None:", "return first if first > second else second", "while number > 0:",
        "number -= 1", "return number + 5",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text, left_out",
    [
        ("x: int = f(1 + 2)\n", False),
        ("x: A[1 + 2] = 0\n", (1, 5)),
        ("def f(a: A[1], b=2): ...\n", (1, 11)),
        ("def f() -> A[1 + 2]: ...\n", (1, 13)),
        ("raise ValueError(1 + 2)\n", (1, 17)),
        ("logger.info(1 + 2)\n", (1, 12)),
        ("warnings.warn(1 + 2)\n", (1, 14)),
        ("Number = A | B\n", (1, 9)),
        ("'é' + f(1)\n", False),
    ],
)
def test_what_is_no_logic(text, left_out):
    at = {position for position, _ in places(text)}
    assert left_out not in at
    assert left_out or at


def test_a_decorator_is_told_without_the_blank_lines_that_go_with_it():
    text = "import functools\n\n\n@functools.cache\ndef f(x):\n    return x\n"
    assert [(each.before, each.after) for each in all_mutants(text)] == [("@functools.cache", "")]


def test_every_mutant_is_another_program_with_one_change():
    for mutant in all_mutants(SOURCE):
        assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(SOURCE))
        assert mutant.before in map(str.strip, SOURCE.splitlines()) and mutant.after in mutant.text
        changed = [line for line in mutant.diff.splitlines()[2:] if line[0] in "+-"]
        assert [line[0] for line in changed] == ["-", "+"], mutant.diff


def test_orders_are_replaced_by_orders_and_arithmetic_by_arithmetic():
    after = {mutant.after for mutant in all_mutants("x = a > b\ny = a - b\nz = a is b\n")}
    orders = {f"x = a {sign} b" for sign in ("==", "!=", "<", "<=", ">=")}
    sums = {f"y = a {sign} b" for sign in ("+", "*", "/", "//", "%")}
    assert {text.replace("  ", " ") for text in after} == orders | sums | {"z = a is not b"}


def test_exceptions_with_dotted_names_are_passed_over():
    made = all_mutants("try:\n    f()\nexcept (a.Error, KeyError):\n    g()\n")
    assert [each.after for each in made] == ["except (a.Error, CosmicRayTestingException):"]


def test_stars_of_calls_and_heads_are_no_operators():
    assert all_mutants("def f(a, *, b): return g(*a, **b), [*a], {**b}\n") == []


WHERE = """@cache
def f(
    a=1,
):
    'Doc.'
    return (
        a
        + 1
    )


class C:
    x = 1
"""


def test_where_a_line_stands():
    source = Source(WHERE)
    assert source.scope(3).head and list(source.scope(3).function) == [5, 6, 7, 8, 9]
    inside = source.scope(8)
    assert not inside.head and list(inside.statement) == [6, 7, 8, 9] and list(inside.function) == [5, 6, 7, 8, 9]
    assert source.scope(13).head and source.scope(13).function is None


def test_a_loop_is_its_head_and_its_body_apart():
    source = Source("def f():\n    for x in (\n        1, 2\n    ):\n        g(x)\n    else:\n        h()\n")
    assert list(source.scope(3).statement) == [2, 3, 4]
    assert list(source.scope(5).statement) == [5] and list(source.scope(7).statement) == [7]


def test_a_draw_is_the_same_for_the_same_seed(tmp_path):
    root, folders = write_tree(tmp_path / "tree"), {"decode": [FILE]}
    draws = [sample(root, folders, 5, seed, 2)["decode"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and len(draws[0]) == 5
    places_drawn = [(mutant.line, mutant.operator.split("_")[0]) for mutant in draws[0]]
    assert len(set(places_drawn)) == 5, "one of each place"
    assert len(sample(root, folders, 1000, 0, 2)["decode"]) <= len(places(SOURCE))


def test_small_folders_get_their_least(tmp_path):
    root = write_tree(tmp_path / "tree")
    (root / "large.py").write_text("\n".join(f"x{k} = {k}" for k in range(60)))
    drawn = sample(root, {"large": ["large.py"], "small": [FILE]}, 10, 0, 4)
    assert len(drawn["small"]) == 4 and len(drawn["large"]) == round(10 * 60 / (60 + len(places(SOURCE))))


def test_reasons_are_of_lines_that_still_stand():
    known = read_equivalents()
    assert len({(each.file, each.before, each.after) for each in known}) == len(known)
    for each in known:
        lines = {line.strip() for line in (ROOT / each.file).read_text().splitlines()}
        assert each.before in lines and each.before != each.after and each.reason, each
