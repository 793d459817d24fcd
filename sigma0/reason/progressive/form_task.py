"""A problem for a model that was taught to check answers: answered, checked with reasons, corrected by the check."""

from sigma0.reason.forms import checking, part, read_check
from sigma0.reason.messages import Completion
from sigma0.reason.progressive.verify_loop import Turn, Verification


class FormTask:
    """A problem that is asked as it stands and verified by the form `check`; a `ProgressiveTask`.

    Args:
        problem: A text, and a question at its end.

    Raises:
        ValueError: If it is not that.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self._parts = part(problem)

    def solve(self, turn: Turn) -> str:
        """See `ProgressiveTask`."""
        return _ask(turn, self.problem).text.strip()

    def verify(self, turn: Turn, solution: str) -> Verification:
        """Whether the check concludes what the solution says, and says that it is right.

        One that was cut off, and one whose conclusion and last word contradict each other, passes nothing. The report
        is what it concludes.
        """
        reply = _ask(turn, checking(self._parts, solution))
        if reply.finish_reason == "length":
            return Verification(False, None, "the check was cut off, which passes nothing")
        check = read_check(reply.text)
        agrees = check.conclusion == solution
        if check.is_right is not agrees:
            return Verification(False, None, f"the check contradicts itself, or has no end: {reply.text[-60:]!r}")
        if agrees:
            return Verification(True, None, f"the check concludes the same from {len(check.reasons)} reasons")
        return Verification(False, check.conclusion or None, f"the check concludes {check.conclusion!r:.80}")

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """What the check concludes takes the solution's place."""
        return report


def _ask(turn: Turn, text: str) -> Completion:
    return turn.text([{"role": "user", "content": text}])
