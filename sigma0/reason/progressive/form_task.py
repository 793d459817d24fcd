"""A problem for a model that was taught to check answers: answered, checked with reasons, corrected by the check."""

from sigma0.reason.forms import checking, part, read_check, settled
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
        return settled(self._parts.question, _ask(turn, self.problem).text.strip())

    def verify(self, turn: Turn, solution: str) -> Verification:
        """Whether the check, from its reasons, concludes what the solution says.

        The two are compared here, and yes or no is computed from each one's statement (`settled`): the check's own last
        word is a model's comparison of two sentences, which small models are bad at. A check that was cut off, or
        concludes nothing, passes nothing. The report is what it concludes.
        """
        reply = _ask(turn, checking(self._parts, solution))
        if reply.finish_reason == "length":
            return Verification(False, None, "the check was cut off, which passes nothing")
        check = read_check(reply.text)
        concluded = settled(self._parts.question, check.conclusion)
        if not concluded or not any(reason in self._parts.sentences for reason in check.reasons):
            return Verification(False, None, f"the check concludes nothing from the text: {reply.text[-60:]!r}")
        if concluded == settled(self._parts.question, solution):
            return Verification(True, None, f"the check concludes the same from {len(check.reasons)} reasons")
        return Verification(False, concluded, f"the check concludes {concluded!r:.80}")

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """What the check concludes takes the solution's place."""
        return report


def _ask(turn: Turn, text: str) -> Completion:
    return turn.text([{"role": "user", "content": text}])
