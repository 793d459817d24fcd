"""What `sigma0 chat` reads and prints: an edited line with a history in a terminal, plain lines elsewhere."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
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


@dataclass(eq=False)
class ChatLoop:
    """Takes lines until there are no more, and prints what they lead to.

    Answers and what slash commands show go to `out`; errors, notes and how an answer ended go to `err`. Where somebody
    sits at a terminal there is a greeting, a line of figures under each answer, and Ctrl-C stops an answer instead of
    the command.
    """

    conversation: Conversation
    name: str  # Of the model
    about: About | None  # What its checkpoint says of itself
    out: Console
    err: Console
    interactive: bool  # Whether somebody sits at a terminal

    def run(self, read_line: ReadLine) -> None:
        """Until the lines end, or `/quit`."""
        self._greet()
        while (line := read_line()) is not None:
            try:
                if line.startswith("/"):
                    reply = self.conversation.command(line)
                    for text in reply.lines:
                        self.out.print(text)
                    if reply.ends:
                        return
                elif line.strip():
                    self._answer(line)
            except ValueError as error:
                print_error(error)
            except KeyboardInterrupt:
                # what was being shown is broken off, the conversation goes on
                if not self.interactive:
                    raise
                self.out.print()

    def _greet(self) -> None:
        conversation = self.conversation
        if not conversation.has_template:
            self._note(
                f"{self.name} has no chat template: turns are joined by line breaks, and continued as one plain text"
            )
        if not self.interactive:
            return
        config = exit_in_words(conversation.exit_config)
        lines = [f"{self.name}, {conversation.total_loops} loops at full depth; {config}"]
        if self.about is not None:
            lines.append(f"{self.name} knows {self.about.knows}.")
            lines += [f"Try: {example.prompt}" for example in self.about.examples[:1]]
        for line in [*lines, f"/help lists the commands, {HOW_TO_QUIT}."]:
            self.out.print(Text(line), soft_wrap=False)

    def _answer(self, message: str) -> None:
        if (note := unseen_note(self.name, self.about, message)) is not None:
            self._note(note)
        before, stopped = len(self.conversation.turns), False
        try:
            with _interrupts() as interrupted, closing(self.conversation.ask(message)) as tokens:
                for token in tokens:
                    style = depth_style(token.depth, self.conversation.total_loops)
                    self.out.print(Text(printable(token.text), style=style), end="")
                    if interrupted:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            stopped = True
        except (ValueError, FloatingPointError) as error:
            if len(self.conversation.turns) > before:
                self.out.print()
            print_error(error)
            return
        self.out.print()
        if len(self.conversation.turns) == before:
            self._note("stopped before the first token: the message is not kept")
        else:
            self._print_end(self.conversation.turns[-1], stopped)

    def _print_end(self, turn: Turn, stopped: bool) -> None:
        """How an answer ended, where it is not as usual; in a terminal also its savings."""
        generation, count = turn.generation, len(turn.tokens)
        parts = [f"{count} {'token' if count == 1 else 'tokens'}"]
        if generation is not None and generation.mean_depth is not None and generation.passes_saved is not None:
            parts.append(f"mean depth {generation.mean_depth:.2f} of {generation.total_loops}")
            parts.append(f"passes saved {generation.passes_saved:.0%}")
        ends = {"length": "cut at --max-new-tokens", "collapse": "ended, since it ran in circles"}
        end = "stopped; what was written is kept" if stopped else ends.get(generation.stop_reason if generation else "")
        if end or self.interactive:
            self._note(", ".join([*parts, *filter(None, [end])]))

    def _note(self, text: str) -> None:
        self.err.print(Text(text, style="dim"), soft_wrap=not self.interactive)


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

    A file keeps the lines between conversations, which takes the extra; without one this process does. What is printed
    at Ctrl-C at an empty prompt goes to `out`.
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
    from prompt_toolkit.history import FileHistory

    if history is not None:
        history.open("a").close()
    session: PromptSession[str] = PromptSession(
        # without a file the session keeps the lines itself
        history=None if history is None else FileHistory(str(history)),
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
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
