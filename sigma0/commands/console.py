"""What the command line prints: coloured tokens, the legend, tables, progress and errors."""

import gc
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unicodedata import category

import typer
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from sigma0.errors import one_line

if TYPE_CHECKING:
    from sigma0.api import TextStream
    from sigma0.signals.confidence import ConfidenceModel
    from sigma0.signals.generation import Generation

# From shallow to deep; distinguishable with red-green colour blindness too.
PALETTE = ("#4575b4", "#74add1", "#66c2a5", "#fee08b", "#fdae61", "#f46d43", "#d73027", "#a50026")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns bad input, and weights or logits that are not finite, into one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError) as error:
        print_error(error)
        raise typer.Exit(2) from error


def print_error(error: Exception) -> None:
    """Prints what went wrong, in one line on stderr."""
    Console(stderr=True, highlight=False).print(f"error: {one_line(error)}", style="red", markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """Untrusted text made safe for a terminal: control characters but newline and tab become U+FFFD."""
    return "".join(sign if sign in "\n\t" or category(sign) not in ("Cc", "Cs") else "\ufffd" for sign in text)


def log_to_stderr() -> None:
    """Writes the log of a server's process to stderr, from INFO on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@contextmanager
def progress_bar(what: str, total: int, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Shows a bar on stderr; yields a function that takes the number done so far."""
    from rich import progress as bars

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn())
    times = (bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, *times, console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def loading(what: str, hidden: bool = False) -> Iterator[None]:
    """Shows on a terminal what is being loaded, as long as it is; elsewhere stderr stays as it is."""
    console = Console(stderr=True, highlight=False)
    # one line and no spinner, whose thread would take time from what it waits for
    shown = console.is_terminal and not hidden
    if shown:
        console.print(Text(f"loading {what}", style="dim", overflow="ellipsis", no_wrap=True), end="\r")
    try:
        yield
    finally:
        if not gc.isenabled():
            # what there is by now stays: the collector need not look at it (`cli.run`)
            gc.freeze()
            gc.enable()
        if shown:
            console.control(Control((ControlType.ERASE_IN_LINE, 2)))


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Shows on stderr that something is being compiled, as long as it is."""
    with Console(stderr=True).status(f"compiling {what}"):
        yield


def depth_style(depth: int, total_loops: int) -> str:
    """Colour of a loop, from 1 to T, spread over the palette."""
    return PALETTE[round((depth - 1) / max(1, total_loops - 1) * (len(PALETTE) - 1))]


def print_stream(tokens: "TextStream", looped: Any, prompt: str, svg: str | None, verdict: bool) -> None:
    """Prints tokens as they come, in the colours of their depths, then legend, savings and verdict; draws the same."""
    total_loops = looped.num_loops
    console = Console(highlight=False, soft_wrap=True)
    text = Text()
    for token in tokens:
        piece = Text(token.text, style=depth_style(token.depth, total_loops))
        console.print(piece, end="")
        text.append_text(piece)
    console.print("\n")
    generation = tokens.generation
    report = [legend([token.depth for token in generation.tokens], total_loops), *map(Text, summary(generation))]
    if verdict:
        report += [Text(""), *map(Text, verdict_lines(generation, looped.confidence_model))]
    for line in report:
        console.print(line)
    if svg is not None:
        # no escape codes: rich keeps those of a style for every console of the process, whatever its colours
        picture = Console(record=True, width=100, file=io.StringIO(), color_system=None, highlight=False)
        picture.print(Text(prompt, style="dim"), text, "", *report, sep="\n")
        picture.save_svg(svg, title="sigma0 generate")


def legend(depths: Sequence[int], total_loops: int) -> Text:
    """How many tokens were read at each loop of T, in the loop's colour."""
    text = Text("tokens by loop  ")
    counts = Counter(depths)
    for depth in range(1, total_loops + 1):
        text.append(f" {depth}: {counts[depth]} ", style=f"black on {depth_style(depth, total_loops)}").append(" ")
    return text


def summary(generation: "Generation") -> list[str]:
    """The savings under their names, one a line, and why the text ended."""
    new = len(generation.tokens)
    lines = [f"new tokens      {new} (ended by {generation.stop_reason}), {generation.total_loops} loops at full depth"]
    if generation.mean_depth is None:
        lines.append("savings         none to tell: they count the tokens after the first, and there is one token")
        return lines
    if generation.tokens_forced:
        fewer = f"{generation.forced_passes_saved} passes fewer than at full depth"
        lines.append(f"tokens_forced   {generation.tokens_forced}  left as the only choice, not read: {fewer}")
    lines.append(f"mean depth      {generation.mean_depth:.2f}, over the tokens after the first")
    saved = generation.depth_saved, generation.passes_saved, generation.rows_saved
    return [*lines, *savings_lines(saved, generation.loop_passes, generation.loop_rows)]


def savings_lines(saved: Sequence[Any], passes: int, rows: int) -> list[str]:
    """The savings of depth, passes and rows, as shares, with what they count."""
    return [
        f"depth_saved     {saved[0]:.1%}  notional, from the exit depths alone",
        f"passes_saved    {saved[1]:.1%}  {passes} passes run: latency",
        f"rows_saved      {saved[2]:.1%}  {rows} rows run: arithmetic",
    ]


def verdict_lines(generation: "Generation", confidence_model: "ConfidenceModel | None") -> list[str]:
    """The verdict, one line for each fact with the reason for it, and the door it opens."""
    from sigma0.signals.verdict import digits, explain

    verdict, grounding = generation.verdict, generation.grounding
    if verdict is None or grounding is None:
        raise ValueError("no verdict was asked for: pass verdict=True")
    tokens = generation.tokens
    reasons = Counter(token.reason for token in tokens).most_common()
    fates = Counter(token.fate or "unknown" for token in tokens).most_common()
    nearest = max(tokens, key=lambda token: token.proximity or 0.0)
    trust = "not known" if verdict.confidence is None else digits(verdict.confidence)
    if confidence_model is None:
        trust += ": exp(-mean entropy), a score that is not calibrated"
    else:
        trust += ", out of calibration" if verdict.reason == "out_of_calibration" else ""
        ranks = "" if confidence_model.auroc is None else f" AUROC {confidence_model.auroc:.3f},"
        error = confidence_model.calibration_error
        trust += f": fitted on {confidence_model.answers} answers,{ranks} calibration error {error:.3f}"
    known = {True: "yes, which says nothing of truth", False: "no", None: "not known"}
    lines = [
        f"confidence      {trust}",
        f"converged       {known[verdict.converged]}: {', '.join(f'{count} {name}' for name, count in reasons)}",
        f"depth           {verdict.depth:.2f} of {generation.total_loops} loops on average",
        f"stable          {verdict.stable or 'not known'}: {', '.join(f'{count} {name}' for name, count in fates)}",
        f"proximity       {verdict.proximity:.2f} to a loop in the text, at most (at {nearest.text!r})",
    ]
    if grounding.score is None:
        lines.append("grounded        not known: nothing in the text can be checked")
    else:
        looked_up = [claim.anchored for claim in grounding.claims if claim.anchored is not None]
        lines.append(f"grounded        {grounding.score:.2f}: {sum(looked_up)} of {len(looked_up)} claims are anchored")
        lines += [f"                without an anchor: {claim.text}" for claim in grounding.unanchored]
    steps = [claim.text for claim in grounding.claims if claim.anchored is None]
    lines += [f"                may follow by a step of arithmetic, not checked: {text}" for text in steps]
    lines.append(f"door            {explain(verdict, generation.policy)}")
    return lines
