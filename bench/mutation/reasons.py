"""Why some mutants cannot be killed: reasons by file, line and replacement, kept in a file beside the bench."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sigma0.bench.core.rows_tests import Survivor
from sigma0.bench.mutation.campaign import Judged
from sigma0.bench.mutation.mutants import Mutant

FILE = Path(__file__).with_name("equivalent.toml")


class Equivalent(BaseModel):
    """A mutant that no test can notice.

    Attributes:
        file: The source.
        before: The line as it is, without its indent.
        after: As the mutant has it.
        reason: Why that makes no difference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    before: str
    after: str
    reason: str


class Reasons:
    """The reasons that are known.

    Args:
        known: Them.
    """

    def __init__(self, known: tuple[Equivalent, ...] = ()) -> None:
        self._known = {(each.file, each.before, each.after): each.reason for each in known}

    def of(self, mutant: Mutant) -> str | None:
        """Why a mutant cannot be killed; None where no reason is known."""
        return self._known.get((mutant.file, mutant.before, mutant.after))


def read_equivalents(path: Path = FILE) -> tuple[Equivalent, ...]:
    """The mutants of a file of reasons.

    Raises:
        ValueError: If it is none.
    """
    import toml  # cosmic-ray brings it; Python's own comes with 3.11

    return tuple(Equivalent(**each) for each in toml.loads(path.read_text())["mutant"])


def survivors(judged: list[Judged], reasons: Reasons) -> tuple[Survivor, ...]:
    """The mutants that no test noticed, by file and line."""
    return tuple(
        Survivor(
            file=each.mutant.file, line=each.mutant.line, before=each.mutant.before, after=each.mutant.after,
            tests=each.tests, reason=reasons.of(each.mutant),
        )
        for each in sorted(judged, key=lambda each: (each.mutant.file, each.mutant.line, each.mutant.after))
        if each.outcome == "survived"
    )  # fmt: skip
