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
        """Whether the model, having written its reasons, says that the solution is right.

        Reasons that the text does not hold, and reasons that were cut off, pass nothing. The report is what the check
        concludes.
        """
        reply = _ask(turn, checking(self._parts, solution))
        if reply.finish_reason == "length":
            return Verification(False, None, "the check was cut off, which passes nothing")
        check = read_check(reply.text)
        if check.is_right is None:
            return Verification(False, None, f"the check ends in neither yes nor no: {reply.text[-40:]!r}")
        if check.is_right:
            return Verification(True, None, f"the check agrees by {len(check.reasons)} reasons")
        return Verification(False, check.conclusion or None, f"the check concludes {check.conclusion!r:.80}")

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """What the check concludes takes the solution's place."""
        return report


def _ask(turn: Turn, text: str) -> Completion:
    return turn.text([{"role": "user", "content": text}])
