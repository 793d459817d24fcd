"""Solve, verify at the level in force, correct from the bug report alone, again: until the gates or a limit end it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sigma0.config import Effort, Messages
from sigma0.reason.desk import Desk, LimitReached
from sigma0.reason.messages import MAX_TOKENS, ChatModel, ChatSettings, Completion, Usage
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.memory import Memory, read_memory, write_memory
from sigma0.reason.trail import Outcome


@dataclass(frozen=True)
class Turn:
    """One step's way of asking: a task says what, the turn says whom and how."""

    desk: Desk  # Where questions are counted and written down
    model: ChatModel  # Who is asked
    purpose: str  # Of the step, such as "verify 3": its questions have their seed from it
    effort: Effort  # Of the step
    temperature: float  # Of texts; labels are greedy
    max_tokens: int  # Of each text at most

    def text(self, messages: Messages, part: str = "") -> Completion:
        """Asks for a text; `part` tells apart several questions of one step."""
        settings = ChatSettings(self.effort, self.max_tokens, self.temperature)
        return self.desk.ask(self.model, f"{self.purpose}{part}", messages, settings)

    def label(self, messages: Messages, labels: Sequence[str], part: str = "") -> str | None:
        """Asks for one of some labels; None where the answer was none."""
        return self.desk.choose(self.model, f"{self.purpose}{part}", messages, labels, effort=self.effort)


@dataclass(frozen=True)
class Verification:
    """What a verification found."""

    passed: bool  # Whether the solution stands, as far as it can tell
    report: str | None  # The bugs; None where there is nothing to correct by, as when it was cut off
    why: str  # In a few words


class ProgressiveTask(Protocol):
    """What is solved, verified and corrected."""

    def solve(self, turn: Turn) -> str:
        """A first solution."""

    def verify(self, turn: Turn, solution: str) -> Verification:
        """Whether it stands, at the turn's effort."""

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """A better one, from the bug report alone."""


@dataclass(frozen=True)
class VerifyReport:
    """How a run ended.

    Attributes:
        solved: Whether the last stage has the passes that it asks for.
        solution: As it stands; unsolved, the best there is, and not to be trusted.
        why: In a sentence.
        status: As `ProgressiveReasoningManager.get_status` says: schedule, gates, transitions and recent history.
        usage: Of all questions, those before a resumption included.
    """

    solved: bool
    solution: str | None
    why: str
    status: dict[str, Any]
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class VerifyLoop:
    """Runs a task under a policy.

    Args:
        task: What is solved.
        desk: Where questions go; its limits of calls and tokens hold over the run, what ran before a
            resumption included.
        solver: Writes and corrects.
        verifier: Verifies; by default the solver.
        manager: The policy; by default a new one as SIGMA0_PROGRESSIVE_CONFIG says.
        memory: File that is replaced after every iteration.
        problem: What the memory is checked to be of.
        temperature: Of all texts: at 0 a verification says the same whenever it is repeated.
        max_tokens: Of each text at most.
    """

    def __init__(
        self,
        task: ProgressiveTask,
        desk: Desk,
        solver: ChatModel,
        verifier: ChatModel | None = None,
        *,
        manager: ProgressiveReasoningManager | None = None,
        memory: Path | None = None,
        problem: str = "",
        temperature: float = 0.7,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.task = task
        self.desk = desk
        self.solver = solver
        self.verifier = verifier or solver
        self.manager = manager or ProgressiveReasoningManager()
        self.memory = memory
        self.problem = problem
        self.temperature = temperature
        self.max_tokens = max_tokens
        self._solution: str | None = None
        self._report: str | None = None

    def resume(self) -> None:
        """Takes up what the memory file holds: solution, level, streak and schedule.

        Raises:
            ValueError: If there is no such file, or it is of another problem or seed.
        """
        if self.memory is None:
            raise ValueError("there is no memory file to resume from: name one")
        known = read_memory(self.memory)
        if known.problem != self.problem:
            raise ValueError(f"the memory file {str(self.memory)!r} is of another problem: {known.problem[:80]!r}")
        if known.seed != self.desk.seed:
            raise ValueError(f"the memory file {str(self.memory)!r} has seed {known.seed}, not {self.desk.seed}")
        self._solution, self._report = known.solution, known.report
        self.desk.usage = known.spent
        if known.progressive is not None:
            self.manager = ProgressiveReasoningManager.from_dict(known.progressive)

    def run(self) -> VerifyReport:
        """Runs until the gates, a limit of the policy or one of the desk's end it.

        Raises:
            ChatFailed: If a model gives no answer; the memory holds the last whole iteration.
        """
        try:
            if self._solution is None:
                self._solution = self.task.solve(self._turn("solve", "generation"))
                self._remember()
            while not self.manager.get_status()["finished"]:
                self._solution = self._iterate(self._solution)
                self._remember()
        except LimitReached as limit:
            return self._end(str(limit))
        status = self.manager.get_status()
        passes = (
            f"{status['consecutive_passes']} verifications in a row passed at effort {status['verification_level']}"
        )
        return self._end(passes if status["success"] else f"the policy's limit {status['limit']} is reached")

    def _iterate(self, solution: str) -> str:
        """One verification, and the correction that it asks for."""
        index, level = self.manager.get_status()["iteration"], self.manager.get_reasoning_effort("verification")
        verification = self.task.verify(self._turn(f"verify {index}", "verification"), solution)
        outcome = self.manager.update_after_verification(verification.passed)
        status = self.manager.get_status()
        state = {**outcome, "level": level, "waits_for": status["waits_for"], "generation": status["generation_level"]}
        what = "upgrade" if outcome["level_upgraded"] else "pass" if verification.passed else "fail"
        self.desk.trail.decide(what, verification.why, **state)
        if verification.passed or verification.report is None:
            return solution
        self._report = verification.report
        if status["finished"]:
            return solution
        return self.task.correct(self._turn(f"correct {index}", "generation"), solution, verification.report)

    def _turn(self, purpose: str, task_type: str) -> Turn:
        model = self.verifier if task_type == "verification" else self.solver
        effort = self.manager.get_reasoning_effort(task_type)
        return Turn(self.desk, model, purpose, effort, self.temperature, self.max_tokens)

    def _remember(self) -> None:
        if self.memory is not None:
            known = Memory(
                problem=self.problem,
                solution=self._solution,
                report=self._report,
                seed=self.desk.seed,
                progressive=self.manager.to_dict(),
                usage=asdict(self.desk.usage),
            )
            write_memory(self.memory, known)

    def _end(self, why: str) -> VerifyReport:
        status = self.manager.get_status()
        report = VerifyReport(status["success"], self._solution, why, status, self.desk.usage)
        self.desk.trail.add(Outcome(report.solved, report.solution, why, asdict(report.usage)))
        return report
