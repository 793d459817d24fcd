"""What may be set of an agent, and what comes of its work."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from sigma0.reason.agent.agent_context import MIN_CHARS
from sigma0.reason.agent.escalation import ThreeTierEscalation
from sigma0.reason.agent.reports import TestReport
from sigma0.reason.agent.workspace import PROTECTED, WorkspaceLimits
from sigma0.reason.messages import Usage

# the sandbox takes the first word for the interpreter it runs in
TEST_COMMAND = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
# names of what passed, too; what passing tests printed is not asked for
REPORT_FLAGS = ("-rfEp", "--tb=short", "--color=no", "--no-header", "--continue-on-collection-errors")
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class AgentSettings:
    """How an agent works.

    Attributes:
        escalation: When it counts as stuck, and how many steps it has.
        test_command: What runs the tests, in the workspace's root. If it is pytest, flags are added by which it tells
            what passed and failed; of other tools only equal outputs are known as such, and exit code 0.
        test_timeout_s: Seconds of a test run at most.
        test_memory_mb: MiB of a test run at most.
        max_tokens: New tokens of an answer at most.
        temperature: Of every question; 0 is greedy.
        context_chars: Of a question at most, all messages together.
        protected: Patterns of files that the agent may not change: names, or with a `/` at the end folders. Without
            the tests among them, a passing test proves nothing.
        workspace: How much is copied at most.
        held: Whether replies are held to one action by a grammar: of models in this process, and of servers that take
            one. What an action says is still the model's.
        choices: Whether a reply is one of few actions that are listed (`sigma0.reason.agent.choices`), for models that
            were taught them: nothing else is shown, no plan is asked for, and a new strategy bars the edits before it.
    """

    escalation: ThreeTierEscalation = field(default_factory=ThreeTierEscalation)
    test_command: Annotated[tuple[str, ...], Field(min_length=1)] = TEST_COMMAND
    test_timeout_s: Seconds = 60.0
    test_memory_mb: Annotated[int, Field(ge=1)] = 1024
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    context_chars: Annotated[int, Field(ge=MIN_CHARS)] = 16_000
    protected: tuple[str, ...] = PROTECTED
    workspace: WorkspaceLimits = field(default_factory=WorkspaceLimits)
    held: bool = False
    choices: bool = False

    @property
    def is_pytest(self) -> bool:
        """Whether the tests are run by pytest, which names them."""
        return self._pytest_at is not None

    @property
    def full_command(self) -> tuple[str, ...]:
        """The command that is run."""
        place = self._pytest_at
        if place is None:
            return self.test_command
        return (*self.test_command[: place + 1], *REPORT_FLAGS, *self.test_command[place + 1 :])

    @property
    def _pytest_at(self) -> int | None:
        names = [PurePosixPath(part).name for part in self.test_command[:3]]
        return next((place for place, name in enumerate(names) if name in ("pytest", "py.test")), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = asdict(self)
        return {**values, "test_command": list(self.test_command), "protected": list(self.protected)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "AgentSettings":
        """The settings out of the values of `to_dict`; missing ones have their defaults.

        Raises:
            ValueError: For an unknown key or a bad value.
        """
        return cls(**value)


@dataclass(frozen=True)
class AgentResult:
    """What came of an agent's work."""

    # Whether the tests, run by the loop after the last edit, pass, all that were known before it among them
    solved: bool
    patch: str  # From the source to the workspace as it was at the end, solved or not
    steps: int  # Questions for an action; plans are not counted
    tier_reached: int  # The highest tier that acted, 0 to 3
    why: str  # It ended, in a sentence
    report: TestReport | None  # Of the last test run; None where none was possible
    usage: Usage  # Of all questions
    # What broke it off from outside: a model without an answer, or no sandbox; None otherwise
    failed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {name: value for name, value in vars(self).items() if name not in ("report", "usage")}
        return {**values, "report": self.report and self.report.to_dict(), "usage": asdict(self.usage)}
