"""A problem for a model that follows no instructions: the bare question, asked again at rising depth.

Such a model continues what it was trained on. "Solve this step by step" is to it a text that it never saw, and so is a
bug report. What can be asked of it is the question itself, anew: with another seed, and at higher effort with more
loops. An answer that comes back the same passes a verification. That is agreement with itself, and no proof: a model
that is sure of a wrong answer repeats it.
"""

from sigma0.reason.messages import Completion
from sigma0.reason.progressive.verify_loop import Turn, Verification


class BareQuestion:
    """A problem that is asked as it stands; a `ProgressiveTask`.

    Args:
        problem: What is asked.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def solve(self, turn: Turn) -> str:
        """See `ProgressiveTask`."""
        return self._ask(turn).text.strip()

    def verify(self, turn: Turn, solution: str) -> Verification:
        """Whether the same answer comes again; one that was cut off at its limit of tokens passes nothing."""
        again = self._ask(turn)
        if again.finish_reason == "length":
            return Verification(False, None, "the answer was cut off, which passes nothing")
        said = again.text.strip()
        if said.split() == solution.split():
            return Verification(True, None, "asked again, it answers the same")
        return Verification(False, said or "nothing", f"asked again, it answers {said!r:.80}")

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """Asks anew; that the answers differ is all that is known."""
        return self._ask(turn).text.strip()

    def _ask(self, turn: Turn) -> Completion:
        return turn.text([{"role": "user", "content": self.problem}])
