"""Lemmas that count: a program must go through the cases, and what it finds stands, whatever a text claims."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b

from sigma0.reason.desk import Desk
from sigma0.reason.lemma.boxed import boxed
from sigma0.reason.lemma.gate import (
    GateRefused,
    Program,
    as_text,
    numbers_in,
    refuse_without_assertions,
    refuse_without_numbers,
)
from sigma0.reason.lemma.graph import FINAL, Lemma, shortened
from sigma0.reason.lemma.origins import Origin
from sigma0.reason.lemma.running import Runner, objection_to, run_written_down
from sigma0.reason.lemma.settings import LemmaSettings

RESULT = "result"
_COUNTS = re.compile(r"\bhow many\b|\bnumber of\b|\bcount(?:s|ed|ing)?\b", re.I)
_ENUMERATE = re.compile(r"\benumerat", re.I)
_ASKS = re.compile(r"(?:how|what|count|find|determine|compute|calculate|enumerate)\b|.*\?\s*$", re.I | re.DOTALL)
_CLAIM = re.compile(
    r"(?:\b(?:is|are|equals|exactly)\b|=)[\s$*`]*(?:\\boxed\s*\{\s*)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})[\s$*`}.!]*$"
    r"|\bthere (?:is|are) (?:exactly )?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})\b",
    re.I,
)
_WHOLE = re.compile(r"-?[0-9]{1,1000}")


@dataclass(frozen=True)
class Count:
    """What became of a count."""

    value: str | None  # Counted by the program; None where it is not to be trusted
    objection: str | None = None  # Why not, in words
    # Numbers that were claimed and are not it, by where they were
    overruled: Mapping[str, str] = field(default_factory=dict)
    derived: bool = False  # Whether it was computed from values that had been enumerated before


@dataclass(frozen=True)
class CountingCode:
    """A program that counts, as it is run."""

    code: str  # Without assertions that say nothing or merely state the estimate, and with a line that tells the result
    marker: str  # That this line begins with
    estimate: str | None  # The number that those assertions stated; the last one of several
    derived: bool = False  # As in `Count`


def is_counting(lemma: Lemma, problem: str) -> bool:
    """Whether a lemma asks for a count, so that it must be enumerated; FINAL does so where the problem does.

    Args:
        lemma: It.
        problem: That is being solved.
    """
    question = f"{lemma.statement}\n{problem}" if lemma.id == FINAL else lemma.statement
    enumerates = lemma.type == "computational" and _ENUMERATE.search(lemma.verification_strategy) is not None
    return enumerates or _COUNTS.search(question) is not None


def claimed(statement: str) -> str | None:
    """The number that a counting statement claims to be the count: "is 12" at its end, or "there are 12".

    Args:
        statement: One that asks or orders claims nothing.
    """
    match = None if _ASKS.match(statement) else _CLAIM.search(statement)
    return str(int((match[1] or match[2]).replace(",", ""))) if match else None


class ExhaustiveSearcher:
    """Lets a program go through all cases of a counting lemma, and reads what it found.

    Args:
        runner: Where the program is run.
        desk: Of the run.
        settings: Its limits.
    """

    def __init__(self, runner: Runner, desk: Desk, settings: LemmaSettings) -> None:
        self.runner = runner
        self.desk = desk
        self.settings = settings

    def search(
        self,
        lemma: Lemma,
        proof: str,
        code: str,
        purpose: str,
        values: Mapping[str, int] | None = None,
        problem: str = "",
    ) -> Count:
        """Runs a program that counts.

        Args:
            lemma: What is counted.
            proof: The text that may claim a number.
            code: The program, as a model wrote it.
            purpose: In the trail.
            values: Counts that were verified before and that it may compute from, by the names that hold them.
            problem: That is being solved: its own numbers are no such counts where the program writes them down.

        Raises:
            GateRefused: If the program is not worth running; says what to change.
            SandboxUnavailable: If there is no isolation, and nothing was run.
        """
        prepared = self.prepare(lemma, code, purpose, values, problem)
        result = run_written_down(self.runner, self.desk, self.settings, purpose, prepared.code)
        objection = objection_to(result, self.settings)
        if objection is not None:
            return Count(None, objection)
        printed = [line for line in result.stdout.splitlines() if line.startswith(f"{prepared.marker} ")]
        value = printed[-1].partition(" ")[2] if printed else ""
        if not _WHOLE.fullmatch(value):
            if printed:
                return Count(None, f"`{RESULT}` is {shortened(value, 40)}, no whole number: bind the count to it")
            return Count(None, f"`{RESULT}` could not be read: let the code run to its end, and print less")
        return Count(value, None, self._overruled(lemma, proof, prepared, value), prepared.derived)

    def prepare(
        self, lemma: Lemma, code: str, purpose: str, values: Mapping[str, int] | None = None, problem: str = ""
    ) -> CountingCode:
        """The program to run in place of a model's.

        Raises:
            GateRefused: If it neither enumerates nor computes from verified counts, binds no `result`, or asserts
                nothing but the estimate.
        """
        stated = numbers_in(f"{problem}\n{lemma.statement}")
        unstated = [value for value in (values or {}).values() if Fraction(abs(value)) not in stated]
        program = Program(code, values, unstated)
        refuse_without_assertions(program)
        derived = _is_derived(program)
        tests = dict.fromkeys(program.vacuous)
        estimates: list[str] = []
        # of a result that is computed from verified counts a stated number is a check: it must hold
        for assertion in [] if derived else program.meaningful:
            kept = _without_estimates(program, assertion, estimates)
            if not any(part is assertion.test for part in kept):
                tests[assertion] = _all_of(kept)
        if not derived and all(tests.get(assertion, assertion) is None for assertion in program.meaningful):
            raise GateRefused(
                f"the assertions merely compare `{RESULT}` with a number: assert something of what is counted, such as "
                "a rule that each case obeys, or a small case that is known"
            )
        claim = claimed(lemma.statement)
        wanted = numbers_in(lemma.statement) - numbers_in(claim or "")
        refuse_without_numbers(program.numbers([name for name, test in tests.items() if test is None]), wanted)
        marker = blake2b(f"{self.desk.seed}/{purpose}/{code}".encode(), digest_size=16).hexdigest()
        estimate = estimates[-1] if estimates else None
        return CountingCode(program.with_tests(tests) + _telling(marker), marker, estimate, derived)

    def _overruled(self, lemma: Lemma, proof: str, prepared: CountingCode, value: str) -> Mapping[str, str]:
        claims = {"statement": claimed(lemma.statement), "proof": boxed(proof), "code": prepared.estimate}
        return {where: claim for where, claim in claims.items() if claim is not None and not same_number(claim, value)}


def same_number(text: str, value: str) -> bool:
    """Whether the only number of a text is a certain whole one."""
    signed = text.strip(" $").startswith("-")
    return signed == value.startswith("-") and numbers_in(text) == {abs(Fraction(value))}


def _is_derived(program: Program) -> bool:
    """Whether the result is computed from verified counts.

    Raises:
        GateRefused: If it is not, and is enumerated neither.
    """
    origin = program.origins.at_end(RESULT)
    if origin is None:
        raise GateRefused(f"the code does not bind `{RESULT}` at its top level: bind the count to it")
    if origin & Origin.VERIFIED:
        return True
    if not origin & Origin.ENUMERATED:
        names = f", or compute it from {', '.join(program.values)}" if program.values else ""
        raise GateRefused(
            f"`{RESULT}` comes of no enumeration: go through the cases with a loop, a comprehension or itertools{names}"
        )
    return False


def _without_estimates(program: Program, assertion: ast.Assert, estimates: list[str]) -> list[ast.expr]:
    """Parts of a test that all must hold, without those that state the estimate; the numbers of these are noted."""
    result = {ast.dump(ast.Name(RESULT, ast.Load())), *map(ast.dump, _bound_to_result(program.tree))}

    def is_result(node: ast.expr) -> bool:
        return ast.dump(node) in result

    def parts(test: ast.expr) -> list[ast.expr]:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            kept = [part for value in test.values for part in parts(value)]
            return [test] if kept == test.values else kept
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
        if not any(map(is_result, sides)):
            return [test]
        if any(program.is_computed(assertion, side) for side in sides if not is_result(side)):
            return [test]
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
            estimates.extend(as_text(number) for side in sides if not is_result(side) for number in _stated(side))
        return []

    return [part for part in parts(assertion.test) if program.says_something(assertion, part)]


def _stated(side: ast.expr) -> frozenset[Fraction]:
    return numbers_in(ast.unparse(side).replace("_", ""))


def _bound_to_result(tree: ast.Module) -> list[ast.expr]:
    """What stands for `result` itself: the expressions that it is bound to."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == RESULT for target in node.targets)
        and not isinstance(node.value, ast.Constant)
    ]


def _all_of(parts: list[ast.expr]) -> ast.expr | None:
    if len(parts) > 1:
        return ast.BoolOp(ast.And(), parts)
    return parts[0] if parts else None


def _telling(marker: str) -> str:
    """The line after a program that tells its result; a name of the program's own cannot stand in its way."""
    return (
        f"\n__import__('sys').stdout.write('\\n{marker} ' + "
        f"('a truth value' if {RESULT} is True or {RESULT} is False else "
        f"'%d' % __import__('operator').index({RESULT})) + '\\n')\n"
    )
