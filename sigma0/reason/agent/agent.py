"""An agent that repairs a repository until its tests pass, and escalates when it is stuck.

The loop acts, the model only says what it would like done: the loop runs the tests, switches the strategy, takes tools
away, raises the model and resets the workspace, as the table of `sigma0.reason.agent.escalation` has it.

| in tier | model | effort | tools |
|---|---|---|---|
| 0, 1 | the cheapest; one rung higher for each slate before | the strategy's | all |
| 2 | one rung higher than that | raised one level where there is no higher rung | edit, run_tests, start_over, finish |
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from sigma0.config import Effort, Messages
from sigma0.reason.agent import choices
from sigma0.reason.agent.actions import (
    ActionFault,
    AnyAction,
    EditFile,
    Finish,
    ListFolder,
    ReadFile,
    RunTests,
    StartOver,
    action_grammar,
    parse_action,
)
from sigma0.reason.agent.agent_context import TASK_PART, AgentContext, cut
from sigma0.reason.agent.agent_settings import AgentResult, AgentSettings
from sigma0.reason.agent.escalation import Escalator, Measure, ProgressTracker
from sigma0.reason.agent.reports import CommandRunner, TestReport, read_report
from sigma0.reason.agent.work_strategies import STRATEGIES, next_strategy, opening_of, raised
from sigma0.reason.agent.workspace import Workspace, WorkspaceFault
from sigma0.reason.desk import Desk, LimitReached
from sigma0.reason.messages import ChatFailed, ChatModel, ChatSettings
from sigma0.reason.sandbox.sandbox import SandboxUnavailable
from sigma0.reason.trail import Run

__all__ = ["AgentResult", "AgentSettings", "RepoAgent"]

WARNED_TIER = 2
# what changes or tests: finish tests, too, and start_over takes back what led nowhere
WARNED_TOOLS = (EditFile, RunTests, StartOver, Finish)
SHOWN_CHARS = 300
PLAN_TOKENS = 400


class RepoAgent:
    """Repairs repositories.

    Args:
        models: The cheapest first.
        runner: Runs the tests; `Sandbox`.
        desk: Asks the models, under its limits, and holds the trail.
        settings: How it works.

    Raises:
        ValueError: Without a model.
    """

    def __init__(
        self, models: Sequence[ChatModel], runner: CommandRunner, desk: Desk, settings: AgentSettings | None = None
    ) -> None:
        if not models:
            raise ValueError("an agent needs at least one model")
        self.models = tuple(models)
        self.runner = runner
        self.desk = desk
        self.settings = settings or AgentSettings()

    def solve(self, task: str, source: Path) -> AgentResult:
        """Works on a copy of a folder until its tests pass or a limit is reached.

        Nothing is raised once the work has begun: a model that gives no answer, and a sandbox that cannot run, end it,
        and are reported in `AgentResult.failed` beside the patch so far.

        Args:
            task: What is to be done.
            source: The repository; it is not written.

        Raises:
            ValueError: For a task that is too long, or a source that cannot be copied.
        """
        limit = int(self.settings.context_chars * TASK_PART)
        if len(task) > limit:
            raise ValueError(f"the task has {len(task)} characters, {limit} fit: shorten it or raise context_chars")
        with Workspace(source, self.settings.workspace, self.settings.protected) as workspace:
            return _Work(self, task, workspace).run()


class _Work:
    """One repository's repair."""

    def __init__(self, agent: RepoAgent, task: str, workspace: Workspace) -> None:
        self.models, self.runner, self.desk = agent.models, agent.runner, agent.desk
        self.settings, self.trail = agent.settings, agent.desk.trail
        self.task = task
        self.workspace = workspace
        self.escalator = Escalator(self.settings.escalation)
        self.tracker = ProgressTracker()
        self.before: TestReport | None = None
        self.report: TestReport | None = None
        self.context: AgentContext | None = None
        self.tested = -1
        self.test_runs = 0
        self.plans = 0
        self.steps = 0
        self.failed: str | None = None
        # of choices: the file last read, edits so far, and those that are not to be made again
        self.shown: str | None = None
        self.tried: set[EditFile] = set()
        self.barred: frozenset[EditFile] = frozenset()

    def run(self) -> AgentResult:
        try:
            why = self._work()
        except SandboxUnavailable as error:
            self.failed = str(error)
            why = f"no tests could be run, and nothing is run outside the sandbox: {error}"
        solved = self._is_solved()
        if solved:
            assert self.report is not None
            why = f"all tests pass after the last edit, {len(self.report.passed)} of them by name"
        self.trail.decide("solved" if solved else "unsolved", why, steps=self.steps, tier=self.escalator.highest)
        return AgentResult(
            solved=solved,
            patch=self.workspace.patch(),
            steps=self.steps,
            tier_reached=self.escalator.highest,
            why=why,
            report=self.report,
            usage=self.desk.usage,
            failed=self.failed,
        )

    def _work(self) -> str:
        """Works to the end, and tells why it is one."""
        self.before = self._test()
        if self.before.ok:
            return "the tests pass before any edit, so that they cannot tell a solution: add one that fails"
        self.tracker = ProgressTracker.of_slate(self.before)
        try:
            why = self._take_steps()
        except LimitReached as error:
            why = str(error)
        except ChatFailed as error:
            self.failed = str(error)
            why = f"a model gave no answer: {error}"
        self._test()
        return why

    def _take_steps(self) -> str:
        self._begin_strategy()
        max_steps = self.settings.escalation.max_steps
        for step in range(1, max_steps + 1):
            if self._take_step(step):
                return "the work is finished"
            if self.escalator.is_check(step):
                self._check(step)
                if self._is_solved():
                    return "the tests pass at a check"
        return f"the tests do not all pass after {max_steps} steps, and there are no more"

    def _take_step(self, step: int) -> bool:
        """Asks for an action and takes it; tells whether it finished the work."""
        assert self.context is not None
        warned = self._is_warned
        question, grammar = self._asked(step, warned)
        settings = ChatSettings(self._effort, self.settings.max_tokens, self.settings.temperature, grammar=grammar)
        answer = self.desk.ask(self._model, f"step {step}", question, settings)
        self.steps = step
        reply, finished = answer.text, False
        try:
            action = parse_action(answer.text)
            reply = action.json_line
            if warned and not isinstance(action, WARNED_TOOLS):
                allowed = "edit, run_tests, start_over or finish"
                raise ActionFault(f"{action.action} is not allowed after the last warning: {allowed}.")
            observation = self._act(action)
            what = str(action.action)
            finished = isinstance(action, Finish) and self._is_solved()
        except (ActionFault, WorkspaceFault) as fault:
            what, observation = "refused", str(fault)
        times = self.tracker.act(reply, observation, refused=what == "refused")
        self.trail.decide(what, cut(observation, SHOWN_CHARS), step=step, times=times)
        if times > 1:
            observation += f"\nThis very action has led to this very result {times} times."
        # half a context, so that the answer and what came of it can be shown together
        most = self.settings.context_chars // 4
        self.context.exchanges.append((cut(answer.text, most), cut(observation, most)))
        return finished

    def _asked(self, step: int, warned: bool) -> tuple[Messages, str | None]:
        """What the model is shown, and the grammar that holds its reply."""
        assert self.context is not None
        if self.settings.choices:
            paths = sorted(path for path in self.workspace.files() if not self.workspace.is_protected(path))
            shown = None if self.shown is None else (self.shown, self.workspace.text(self.shown))
            report = self.report if self.tested == self.workspace.revision else None
            text = choices.question(report, paths, shown)
            allowed = choices.actions(paths, shown, self.barred, warned)
            return [{"role": "user", "content": text}], choices.choice_grammar(allowed)
        question = self.context.step_question(step, self.settings.escalation.max_steps, warned)
        grammar = (action_grammar(WARNED_TOOLS) if warned else action_grammar()) if self.settings.held else None
        return question, grammar

    def _act(self, action: AnyAction) -> str:
        """Takes an action, and tells what came of it."""
        match action:
            case ListFolder(path=path):
                return self.workspace.list(path)
            case ReadFile(path=path, start=start, lines=lines):
                text = self.workspace.read(path, start, lines)
                self.shown = path
                return text
            case EditFile(path=path, old=old, new=new):
                self.workspace.edit(path, old, new)
                self.tried.add(action)
                return f"{path} is changed."
            case StartOver():
                self.workspace.reset()
                return "All edits are taken back."
            case RunTests() | Finish():
                report = self._test()
                if self._is_solved():
                    return f"{report.summary}\nAll tests pass: finish, if the task is done."
                return "\n".join(["Not all tests pass.", *self._missing(report), report.summary])

    def _test(self) -> TestReport:
        """What the tests say of the files as they are; they are run if any changed since."""
        if self.report is not None and self.tested == self.workspace.revision:
            return self.report
        self.test_runs += 1
        command = self.settings.full_command
        result = self.runner.run_command(
            command,
            self.workspace.folder,
            timeout_s=self.settings.test_timeout_s,
            memory_mb=self.settings.test_memory_mb,
        )
        self.trail.add(Run(f"tests {self.test_runs}", shlex.join(command), result.to_dict()))
        self.report, self.tested = read_report(result), self.workspace.revision
        if self.before is not None and self.tracker.observe(self.report) and self.escalator.progress():
            why = "there is progress: tools and model go back to those of the lower tier"
            self.trail.decide("lower", why, tier=self.escalator.tier, passed=len(self.report.passed))
        return self.report

    def _check(self, step: int) -> None:
        progressed = self.tracker.check(self._test())
        measure = self.escalator.check(step, self.tracker.stuck)
        why = "there is progress" if progressed else f"{self.tracker.stuck} stuck checks since the last progress"
        self.trail.decide(
            "check",
            why,
            step=step,
            tier=self.escalator.tier,
            signature=self.tracker.history[-1],
            repeats=self.tracker.repeats,
            ping_pong=self.tracker.is_ping_pong,
        )
        if measure is not None:
            self._take_measure(measure, step)

    def _take_measure(self, measure: Measure, step: int) -> None:
        notes = self._notes()
        if measure == "warn":
            why = f"still stuck at step {step}: fewer tools, and more of a model"
            self.trail.decide("warn", why, tier=2, model=self._model.name, effort=self._effort)
            return
        if measure == "replan":
            self.trail.decide("replan", f"stuck at step {step}: a new plan under another strategy", tier=1)
        else:
            self._reset(step)
        self._begin_strategy(notes)

    def _reset(self, step: int) -> None:
        """Takes everything back, for a clean slate."""
        assert self.before is not None
        lost = self.workspace.patch()
        self.workspace.reset()
        assert not self.workspace.patch()
        self.report, self.tested = self.before, self.workspace.revision
        self.tracker = ProgressTracker.of_slate(self.before, self.tracker.approaches)
        why = f"still stuck at step {step}: the workspace is as it was at first"
        self.trail.decide("reset", why, tier=3, slate=self.escalator.slate, lost_patch=lost)

    def _begin_strategy(self, notes: str = "") -> None:
        """Switches to a strategy not tried before, and has a plan made for it; all that was said before is dropped."""
        assert self.report is not None
        tried = self.tracker.approaches
        strategy = next_strategy(STRATEGIES, tried)
        why = "it was not tried before" if strategy.name not in tried else "all were tried: this one the longest ago"
        self.trail.decide("strategy", why, name=strategy.name, effort=strategy.effort)
        tried.append(strategy.name)
        shown = opening_of(strategy, self.workspace, self.report, self.settings.context_chars)
        summary = cut(self.report.summary, self.settings.context_chars // 10)
        opening = f"The tests say:\n{summary}\n\nWhen you began, this stood there:\n\n{shown}"
        self.context = AgentContext(self.task, strategy, opening, self.settings.context_chars, notes)
        if self.settings.choices:
            self.barred, self.shown = frozenset(self.tried), None
            return
        self.plans += 1
        plan = self.desk.ask(
            self._model,
            f"plan {self.plans}",
            self.context.plan_question(),
            ChatSettings(self._effort, min(PLAN_TOKENS, self.settings.max_tokens), self.settings.temperature),
        )
        self.context.plan = plan.text

    def _notes(self) -> str:
        """What did not help, for the next plan."""
        lines = [f"Tried without success: {', '.join(self.tracker.approaches)}."]
        if self.tracker.repeats:
            lines.append(f"{self.tracker.repeats} actions repeated an earlier one, with the same result.")
        if self.tracker.is_ping_pong:
            lines.append("The last actions went to and fro between two.")
        lines += [f"Refused {self.tracker.errors[error]} times: {error}" for error in self.tracker.repeated_errors]
        return "\n".join(lines)

    @property
    def _is_warned(self) -> bool:
        return self.escalator.tier == WARNED_TIER

    @property
    def _model(self) -> ChatModel:
        return self.models[min(self.escalator.slate + self._is_warned, len(self.models) - 1)]

    @property
    def _effort(self) -> Effort:
        assert self.context is not None
        effort = self.context.strategy.effort
        has_higher = self.escalator.slate + 1 < len(self.models)
        return raised(effort) if self._is_warned and not has_higher else effort

    def _is_solved(self) -> bool:
        """Whether the tests passed after the last edit, having failed before the first one."""
        if self.before is None or self.before.ok or self.report is None or self.tested != self.workspace.revision:
            return False
        # code that ends the tests' process early names none
        named = bool(self.report.passed) or not (self.before.named or self.settings.is_pytest)
        return self.report.ok and named and not self._missing(self.report)

    def _missing(self, report: TestReport) -> list[str]:
        """Tests known from the beginning that neither pass nor fail: a solution may not make them vanish."""
        assert self.before is not None
        known = {name for name in self.before.passed | self.before.failing if "::" in name}
        gone = sorted(known - report.passed - report.failing)
        return [f"MISSING {name}" for name in gone]
