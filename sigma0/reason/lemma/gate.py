"""Which assertions of a program say something: a look at strangers' code before any of it is run.

An assertion counts only if its test depends on something computed: a call, a comprehension, arithmetic, a loop, or a
name that holds such (`sigma0.reason.lemma.origins`). These do not:

    x = 5; assert x == 5               written down on both sides
    assert total == total              one thing compared with itself
    x = 5; assert abs(x - 5) < 1e-9    the same as x == 5, as is math.isclose(x, 5)
    assert True or check()             true whatever is computed
    assert (total == 5, "message")     a tuple, which is always true
    assert isinstance(total, int)      a fact about a kind
    def f(): return 5                  and assert f() == 5: a literal in disguise
"""

import ast
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

from sigma0.reason.lemma.graph import shortened
from sigma0.reason.lemma.origins import Origin, Origins

# characters
MAX_CODE = 20_000
_ALWAYS_TRUE = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.GeneratorExp, ast.Lambda, ast.JoinedStr, ast.Constant)
_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+.-]*)[ \t]*$", re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
_NUMBER = re.compile(r"(?<![\w.])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
# digits; longer ones are no numbers of a statement
_LONGEST = 300
# what two numbers may differ by that are meant to be equal
_TOLERANCE = 0.01


class GateRefused(ValueError):
    """Code that is not worth running, with what to change."""


class Program:
    """Code that was parsed and looked at.

    Args:
        code: Python.
        values: Numbers that were enumerated and verified before, by the names that hold them when the code begins.
        restated: Of these numbers those that also count as verified where the code binds a name to them.

    Attributes:
        assertions: All of them.
        meaningful: Those that say something.
        vacuous: Those that do not.
        origins: Where its values come from.

    Raises:
        GateRefused: If it is too long, too deep, or no Python.
    """

    def __init__(self, code: str, values: Mapping[str, int] | None = None, restated: Collection[int] = ()) -> None:
        self.values = dict(values or {})
        if len(code) > MAX_CODE:
            raise GateRefused(f"the code is longer than {MAX_CODE} characters: shorten it")
        with _readable():
            self.tree = ast.parse(code)
            self.origins = Origins(self.tree, self.values, restated)
            self.assertions = [node for node in ast.walk(self.tree) if isinstance(node, ast.Assert)]
            says = [self.says_something(node, node.test) for node in self.assertions]
        self.meaningful = [node for node, said in zip(self.assertions, says, strict=True) if said]
        self.vacuous = [node for node, said in zip(self.assertions, says, strict=True) if not said]

    def says_something(self, assertion: ast.Assert, test: ast.expr, positive: bool = True) -> bool:
        """Whether a test depends on something computed, so that it could have come out otherwise.

        Args:
            assertion: Where it stands.
            test: The assertion's, or a part of it.
            positive: Whether it is asserted, not denied.
        """
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.says_something(assertion, test.operand, not positive)
        if isinstance(test, ast.BoolOp):
            # of several that must all hold one is enough; where one of several is enough, each could be the one
            enough = any if isinstance(test.op, ast.And) == positive else all
            return enough(self.says_something(assertion, part, positive) for part in test.values)
        if isinstance(test, ast.Compare):
            sides = [test.left, *test.comparators]
            enough = any if positive else all
            return enough(self._compares(assertion, *_near(left, right)) for left, right in pairwise(sides))
        if isinstance(test, ast.Call) and len(test.args) == 2 and ast.unparse(test.func) in ("isclose", "math.isclose"):
            return self._compares(assertion, *test.args)
        return not isinstance(test, _ALWAYS_TRUE) and self.is_computed(assertion, test)

    def is_computed(self, assertion: ast.Assert, expression: ast.expr) -> bool:
        """Whether an expression at an assertion depends on something computed."""
        return bool(self.origins.at(assertion, expression) & Origin.COMPUTED)

    def numbers(self, without: Collection[ast.Assert] = ()) -> frozenset[Fraction]:
        """Numbers that the code holds, those in strings included, save in docstrings and assertions' messages.

        The values that it is given are among them.

        Args:
            without: Assertions that are left out.
        """
        skipped: set[ast.AST] = set(without)
        numbers = {Fraction(abs(value)) for value in self.values.values()}
        open_nodes: list[ast.AST] = [self.tree]
        while open_nodes:
            node = open_nodes.pop()
            if node in skipped or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            if isinstance(node, ast.Constant):
                numbers |= _of_constant(node.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
                numbers |= _last_of(node)
            children = [node.test] if isinstance(node, ast.Assert) else ast.iter_child_nodes(node)
            open_nodes += children
        return frozenset(numbers)

    def with_tests(self, tests: Mapping[ast.Assert, ast.expr | None]) -> str:
        """The code with other tests in some assertions, or without them, and with its values bound; to be called once.

        Args:
            tests: By assertion. Where there is None, what it tested is still evaluated, for what that may do.
        """
        with _readable():
            tree: ast.Module = _Retest(tests).visit(self.tree)
            place = _behind_future_imports(tree.body)
            bound = [ast.parse(f"{name} = {value}").body[0] for name, value in self.values.items()]
            tree.body[place:place] = bound
            return ast.unparse(ast.fix_missing_locations(tree))

    def _compares(self, assertion: ast.Assert, left: ast.expr, right: ast.expr) -> bool:
        if ast.dump(left) == ast.dump(right):
            return False
        return self.is_computed(assertion, left) or self.is_computed(assertion, right)


class _Retest(ast.NodeTransformer):
    def __init__(self, tests: Mapping[ast.Assert, ast.expr | None]) -> None:
        self.tests = tests

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if node not in self.tests:
            return node
        test = self.tests[node]
        return ast.Expr(node.test) if test is None else ast.Assert(test, node.msg)


def refuse_without_assertions(program: Program) -> None:
    """Refuses a program that verifies nothing.

    Raises:
        GateRefused: Naming its first assertion that says nothing, if there are any.
    """
    if not program.assertions:
        raise GateRefused("the code holds no assertion: assert what it computes, with `assert`")
    if not program.meaningful:
        shown = shortened(ast.unparse(program.vacuous[0]), 100)
        raise GateRefused(
            f"no assertion mentions anything computed, such as `{shown}`: compute a value and assert something of it"
        )


def refuse_without_numbers(held: Collection[Fraction], wanted: Collection[Fraction], of: str = "the statement") -> None:
    """Refuses a program that holds none of some numbers.

    Raises:
        GateRefused: Naming them, if there are any.
    """
    if wanted and not set(held) & set(wanted):
        shown = ", ".join(as_text(number) for number in sorted(wanted)[:5])
        raise GateRefused(f"the code holds none of the numbers of {of} ({shown}): check it with its own numbers")


def fenced_code(text: str) -> str:
    """The one fenced block of a text.

    Raises:
        GateRefused: If there is none, more than one, one that is not closed, or one in another language.
    """
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), text[opened.end() : fence.start()]))
            opened = None
    if opened is not None:
        raise GateRefused("the code block is not closed: write shorter code, and end it with ```")
    if len(blocks) != 1:
        count = "holds no code block" if not blocks else f"holds {len(blocks)} code blocks"
        raise GateRefused(f"the answer {count}: write all code into one block between ```python and ```")
    language, code = blocks[0]
    if language not in _PYTHON:
        raise GateRefused(f"the code block is in {language[:20]!r}: write Python")
    return code.strip("\n") + "\n"


def numbers_in(text: str) -> frozenset[Fraction]:
    """Numbers of a text, without signs: 1,000 is 1000, and digits after letters are no numbers."""
    digits: Iterable[str] = (match[0].replace(",", "") for match in _NUMBER.finditer(text))
    return frozenset(Fraction(number) for number in digits if len(number) <= _LONGEST)


def as_text(number: Fraction) -> str:
    """A number in words that a model wrote: a whole one, or a decimal."""
    return str(number.numerator) if number.denominator == 1 else str(float(number))


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except SyntaxError as error:
        raise GateRefused(f"the code is no Python, line {error.lineno}: {shortened(error.msg, 120)}") from error
    except (RecursionError, MemoryError) as error:
        raise GateRefused("the code is nested too deeply to be looked at: write it in more steps") from error
    except ValueError as error:
        raise GateRefused(f"the code cannot be read: {error}") from error


def _behind_future_imports(body: list[ast.stmt]) -> int:
    places = [
        place
        for place, node in enumerate(body, start=1)
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    return max(places, default=0)


def _near(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    """What a comparison is about: of abs(a - b) < 0.1 and of a - b == 0 it is a and b."""
    if isinstance(right, ast.Constant) and isinstance(right.value, int | float) and 0 <= right.value < _TOLERANCE:
        if isinstance(left, ast.Call) and ast.unparse(left.func) == "abs" and len(left.args) == 1:
            left = left.args[0]
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub):
            return left.left, left.right
    return left, right


def _last_of(called: ast.Call) -> frozenset[Fraction]:
    """The last number of a range, in front of the one that it is written with."""
    stop = called.args[1:2] or called.args[:1]
    return frozenset(value - 1 for end in stop if isinstance(end, ast.Constant) for value in _of_constant(end.value))


def _of_constant(value: object) -> frozenset[Fraction]:
    if isinstance(value, str):
        return numbers_in(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return frozenset({Fraction(value)})
    if isinstance(value, float) and math.isfinite(value):
        # as it is written: 0.1 is a tenth
        return frozenset({Fraction(repr(value))})
    return frozenset()
