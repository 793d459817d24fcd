"""A problem in prose: solved, criticised in words, judged by a label, corrected from the bug report."""

from sigma0.config import Messages
from sigma0.reason.progressive.policies import Level
from sigma0.reason.progressive.verify_loop import Turn, Verification

PASS, FAIL = "PASS", "FAIL"
REPORT_HEADING = "BUG REPORT:"
_CARE: dict[str, str] = {
    "low": "Look for the plainest mistakes.",
    "medium": "Check every step, and work out every number again.",
    "high": "Check every step, work out every number again, and look for cases that were left out.",
}


class Critique:
    """A problem whose solutions are texts.

    Args:
        problem: What is asked.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def solve(self, turn: Turn) -> str:
        """See `ProgressiveTask`."""
        return turn.text(_user(f"{self.problem}\n\nSolve this step by step. End with the answer.")).text

    def verify(self, turn: Turn, solution: str) -> Verification:
        """First a criticism, then a label on it; only the label decides.

        A criticism that was cut off at its limit of tokens has not seen everything, so that it never passes.
        """
        question = _user(self._question(turn.effort, solution))
        criticism = turn.text(question)
        if criticism.finish_reason == "length":
            return Verification(False, None, "the verification was cut off, which passes nothing")
        judged = [
            *question,
            {"role": "assistant", "content": criticism.text},
            {"role": "user", "content": f"Does the solution stand? Answer with one word: {PASS} or {FAIL}."},
        ]
        label = turn.label(judged, (PASS, FAIL), ", label")
        if label is None:
            return Verification(False, None, "the verification gave no label, which passes nothing")
        if label == PASS:
            return Verification(True, None, "the verification found no fault")
        report = bug_report(criticism.text)
        return Verification(False, report or None, f"the verification found a fault: {' '.join(report.split())[:120]}")

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """See `ProgressiveTask`."""
        text = (
            f"{self.problem}\n\nThis solution has faults:\n{solution}\n\nThe faults:\n{report}\n\n"
            "Write the solution anew without them. End with the answer."
        )
        return turn.text(_user(text)).text

    def _question(self, effort: Level | str, solution: str) -> str:
        return (
            f"Problem:\n{self.problem}\n\nProposed solution:\n{solution}\n\n{_CARE[effort]} "
            f"List each fault under the line '{REPORT_HEADING}', or write that there is none."
        )


def bug_report(criticism: str) -> str:
    """What stands behind the heading of the bug report; all of it where there is no heading."""
    _, heading, after = criticism.partition(REPORT_HEADING)
    return after.strip() if heading and after.strip() else criticism.strip()


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]
