"""What `sigma0 chat` reads and prints: an edited line with a history in a terminal, plain lines elsewhere."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from sigma0.checkpoints.about import About, unseen_note
from sigma0.commands.console import depth_style, print_error, printable
from sigma0.commands.conversation import COMMANDS, Conversation, Turn, exit_in_words

# the next line, or None when there are no more
ReadLine: TypeAlias = Callable[[], str | None]
HOW_TO_QUIT = "Ctrl-D or /quit leaves"


class ChatLoop:
    """Takes lines until there are no more, and prints what they lead to.

    Answers and what slash commands show go to `out`; errors, notes and how an answer ended go to `err`.

    Args:
        conversation: The conversation.
        name: Of the model.
        about: What its checkpoint says of itself, if anything.
        out: Standard output.
        err: Standard error.
        interactive: Whether somebody sits at a terminal: then there is a greeting, a line of figures under each answer,
            and Ctrl-C stops an answer instead of the command.
    """

    def __init__(
        self, conversation: Conversation, name: str, about: About | None, out: Console, err: Console, interactive: bool
    ) -> None:
        self._conversation, self._name, self._about = conversation, name, about
        self._out, self._err, self._interactive = out, err, interactive

    def run(self, read_line: ReadLine) -> None:
        """Until the lines end, or `/quit`."""
        self._greet()
        while (line := read_line()) is not None:
            try:
                if line.startswith("/"):
                    reply = self._conversation.command(line)
                    for text in reply.lines:
                        self._out.print(text)
                    if reply.ends:
                        return
                elif line.strip():
                    self._answer(line)
            except ValueError as error:
                print_error(error)
            except KeyboardInterrupt:
                # what was being shown is broken off, the conversation goes on
                if not self._interactive:
                    raise
                self._out.print()

    def _greet(self) -> None:
        conversation = self._conversation
        if not conversation.has_template:
            self._note(
                f"{self._name} has no chat template: turns are joined by line breaks, and continued as one plain text"
            )
        if not self._interactive:
            return
        config = exit_in_words(conversation.exit_config)
        lines = [f"{self._name}, {conversation.total_loops} loops at full depth; {config}"]
        if self._about is not None:
            lines.append(f"{self._name} knows {self._about.knows}.")
            lines += [f"Try: {example.prompt}" for example in self._about.examples[:1]]
        for line in [*lines, f"/help lists the commands, {HOW_TO_QUIT}."]:
            self._out.print(Text(line), soft_wrap=False)

    def _answer(self, message: str) -> None:
        if (note := unseen_note(self._name, self._about, message)) is not None:
            self._note(note)
        before = len(self._conversation.turns)
        stopped = False
        try:
            with _interrupts() as interrupted, closing(self._conversation.ask(message)) as tokens:
                for token in tokens:
                    style = depth_style(token.depth, self._conversation.total_loops)
                    self._out.print(Text(printable(token.text), style=style), end="")
                    if interrupted:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stopped = True
        except (ValueError, FloatingPointError) as error:
            if len(self._conversation.turns) > before:
                self._out.print()
            print_error(error)
            return
        self._out.print()
        if len(self._conversation.turns) == before:
            self._note("stopped before the first token: the message is not kept")
        else:
            self._print_end(self._conversation.turns[-1], stopped)

    def _print_end(self, turn: Turn, stopped: bool) -> None:
        """How an answer ended, where it is not as usual; in a terminal also its savings."""
        generation, count = turn.generation, len(turn.tokens)
        parts = [f"{count} {'token' if count == 1 else 'tokens'}"]
        if generation is not None and generation.mean_depth is not None and generation.passes_saved is not None:
            parts.append(f"mean depth {generation.mean_depth:.2f} of {generation.total_loops}")
            parts.append(f"passes saved {generation.passes_saved:.0%}")
        ends = {"length": "cut at --max-new-tokens", "collapse": "ended, since it ran in circles"}
        end = "stopped; what was written is kept" if stopped else ends.get(generation.stop_reason if generation else "")
        if end or self._interactive:
            self._note(", ".join([*parts, *filter(None, [end])]))

    def _note(self, text: str) -> None:
        self._err.print(Text(text, style="dim"), soft_wrap=not self._interactive)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the Ctrl-Cs that come, besides what they raise: an exception in a destructor is lost."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def terminal_lines(history: Path | None, out: Console) -> ReadLine:
    """Lines that are edited in the terminal; with the extra `chat`, Tab completes slash commands.

    Args:
        history: File that keeps the lines between conversations; None keeps them for this process.
        out: Says how to quit, where Ctrl-C comes at an empty prompt.

    Raises:
        OSError: If the file cannot be written.
        ValueError: For a file without the extra.
    """
    if find_spec("prompt_toolkit") is None:
        if history is not None:
            raise ValueError("--history needs prompt-toolkit: pip install 'sigma0-lm[chat]'")
        with suppress(ImportError):
            # not on Windows; from here on `input` edits lines, and goes back to earlier ones
            import readline as readline
        return partial(_line, input, lambda: False, out)
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    kept: History = InMemoryHistory()
    if history is not None:
        history.open("a").close()
        kept = FileHistory(str(history))
    session: PromptSession[str] = PromptSession(
        history=kept, completer=WordCompleter(list(COMMANDS), sentence=True), complete_while_typing=False
    )
    return partial(_line, session.prompt, lambda: bool(session.default_buffer.text), out)


def _line(edit: Callable[[str], str], was_begun: Callable[[], bool], out: Console) -> str | None:
    while True:
        try:
            return edit("> ")
        except KeyboardInterrupt:
            # at a line that was begun, Ctrl-C drops the line
            if not was_begun():
                out.print(Text(HOW_TO_QUIT, style="dim"))
        except EOFError:
            return None


def piped_lines() -> str | None:
    """The next line of standard input, where it is no terminal."""
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
