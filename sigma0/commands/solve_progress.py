"""What `sigma0 solve` shows while it works: where the loop stands, and what it decided last."""

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sigma0.commands.console import printable
from sigma0.reason.progressive.policies import LEVELS
from sigma0.reason.trail import Call, Decision, Line, Run

# decisions that stay on the screen
SHOWN = 8
_MARKS = {"verified": "+", "failed": "x", "unverified": "?", "pending": "-", "repair": "~"}


class SolveProgress:
    """Listens to a trail and shows it on stderr: redrawn in place on a terminal, elsewhere a line for each decision.

    Equal decisions that follow each other share a line, which says how many they were.
    """

    def __init__(self, strategy: str, hidden: bool = False) -> None:
        self._strategy = strategy
        self._hidden = hidden
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._began = time.monotonic()
        self._doing = "loading"
        self._questions = self._tokens = self._runs = 0
        self._state: dict[str, Any] = {}
        self._lemmas: dict[str, str] = {}
        self._decisions: deque[Decision] = deque(maxlen=SHOWN)
        self._last, self._repeats = "", 0

    def __enter__(self) -> "SolveProgress":
        if not self._hidden and sys.stderr.isatty():
            self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._print("")
        if self._live is not None:
            self._live.stop()

    def __call__(self, line: Line) -> None:
        """Takes in a line of the trail."""
        if isinstance(line, Call):
            self._questions += 1
            self._doing = f"asked {line.model} to {line.purpose}"
            if line.answer is not None:
                self._tokens += int(line.answer["usage"]["completion_tokens"])
        elif isinstance(line, Run):
            self._runs += 1
            self._doing = f"ran {line.purpose}"
        elif isinstance(line, Decision):
            self._decisions.append(line)
            self._state = {**self._state, **line.state}
            for lemma in (line.state.get("graph") or {}).get("lemmas", ()):
                self._lemmas.setdefault(lemma["id"], lemma["status"])
            name = line.state.get("lemma")
            if isinstance(name, str) and line.what in _MARKS:
                self._lemmas[name] = line.what
            if not self._hidden and self._live is None:
                self._print(printable(f"{line.what}: {line.why}"))

    def _print(self, text: str) -> None:
        """Prints a decision, unless it is the one before; empty ends the last one."""
        if text and text == self._last:
            self._repeats += 1
            return
        if self._repeats:
            self._console.print(f"  and {self._repeats} times more")
        if text:
            self._console.print(text, markup=False, soft_wrap=True)
        self._last, self._repeats = text, 0

    def render(self) -> RenderableType:
        """The screen as it stands."""
        seconds = time.monotonic() - self._began
        head = f"{seconds:5.0f} s  {self._questions} questions, {self._tokens} tokens, {self._runs} runs  {self._doing}"
        decisions = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for decision in self._decisions:
            decisions.add_row(
                Text(decision.what, style="bold"), Text(printable(decision.why), overflow="ellipsis", no_wrap=True)
            )
        return Group(Text(head, style="dim", overflow="ellipsis", no_wrap=True), *self._strategy_lines(), decisions)

    def _strategy_lines(self) -> list[Text]:
        """What this strategy alone has to show."""
        if self._strategy == "lemma":
            return [Text(lemma_line(name, status)) for name, status in self._lemmas.items()]
        state = self._state
        if self._strategy == "agent":
            step, tier, strategy = (state.get(name, "-") for name in ("step", "tier", "strategy"))
            return [Text(f"step {step}, tier {tier}, strategy {strategy}")]
        now = state.get("verification_level", LEVELS[0])
        line = Text("verification ")
        for level in LEVELS:
            line.append(f" {level} ", style="bold reverse" if level == now else "dim").append(" ")
        waits = ", ".join(state.get("waits_for", ())) or "nothing"
        streak, iteration = state.get("consecutive_passes", 0), state.get("iteration", -1) + 1
        return [line.append(f" iteration {iteration}, {streak} passes in a row, waits for {waits}")]


def lemma_line(name: str, status: str) -> str:
    """A lemma with its status."""
    return f"{_MARKS.get(status, '-')} {name}: {status}"


def summary(report: Mapping[str, Any]) -> list[str]:
    """How a run went, out of its report: verifications at each level, where there were any, and what was asked."""
    lines = []
    if "status" in report:
        status = report["status"]
        ends = [(item["level"], item["iteration"] + 1) for item in status["transitions"]]
        ends.append((status["verification_level"], status["iteration"]))
        begins = [0, *(end for _, end in ends)]
        levels = ", ".join(f"{level} {end - begin}" for begin, (level, end) in zip(begins, ends, strict=False))
        lines.append(f"verifications by effort ({status['policy']}): {levels}")
    usage = report["usage"]
    tokens, passes, seconds = usage["completion_tokens"], usage["loop_passes"], usage["seconds"]
    looped = f", {passes} passes" if passes else ""
    lines.append(f"questions {usage['calls']}: {tokens} tokens{looped}, {seconds:.1f} s of answering")
    return lines
