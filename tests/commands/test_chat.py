"""`sigma0 chat`: piped lines, and a line editor on a pipe in place of a keyboard."""

import contextlib
import io
import signal
from dataclasses import replace

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from rich.text import Text

import sigma0
from sigma0.checkpoints.about import About
from sigma0.commands.chat_terminal import HOW_TO_QUIT, ChatLoop, terminal_lines
from sigma0.commands.console import PALETTE
from sigma0.commands.conversation import Conversation
from sigma0.commands.options import SamplingOptions
from tests.commands.test_conversation import FIRST, SECOND
from tests.test_cli import run as command

CTRL_C, CTRL_D, UP, ENTER = "\x03", "\x04", "\x1b[A", "\r"


def run(text, *arguments):
    return command("chat", *arguments, input=text)


class Screen:
    """A conversation with somebody whose keys are typed beforehand."""

    def __init__(self, pocket, kind=Conversation, history=None, about=None):
        settings = SamplingOptions(max_new_tokens=32)
        self.conversation = kind(*pocket, pocket[0].resolve_exit_config(None), settings)
        self.file = io.StringIO()
        self._about, self._history = about, history

    def type(self, *keys):
        """What is on the screen after the keys; the first go ahead of the first prompt, the next of the next one."""
        left = list(keys)
        style = {"file": self.file, "force_terminal": True, "color_system": "truecolor", "width": 400}
        console = Console(highlight=False, soft_wrap=True, _environ={}, **style)
        with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
            read_line = terminal_lines(self._history, console)

            def next_line():
                if left:
                    keyboard.send_text(left.pop(0))
                return read_line()

            talk = ChatLoop(self.conversation, "pocket", self._about, console, console, interactive=True)
            talk.run(next_line)
        return self.file.getvalue()


def strip(text):
    return Text.from_ansi(text).plain


def test_piped_lines_are_turns_and_answers_are_plain():
    result = run(f"{FIRST}\n\n{SECOND}\r\n/after verify\n{SECOND}")
    assert (result.exit_code, result.stderr) == (0, "")
    answers = ["The hat is in the park.", "Ida is in the attic."]
    theta = sigma0.load("pocket")[0].resolve_exit_config(None).theta
    exit_line = f"exit            margin, theta = {theta}, after exit: verify"
    assert result.stdout.splitlines() == [*answers, exit_line, answers[1]]


def test_a_bad_line_is_one_line_on_stderr_and_the_conversation_goes_on():
    result = run(f"/sing\n/exit qexit 9\n{'park ' * 2000}\n{FIRST}\nwhy?\n/quit\n{SECOND}\n")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "The hat is in the park."
    assert "Ida" not in result.stdout, "nothing is read after /quit"
    sing, exit_line, long, note = result.stderr.splitlines()
    assert sing == "error: no such command: /sing; /help lists them"
    assert "must lie in (0, 1], got 9" in exit_line and "exceed the model's context" in long
    assert note.startswith("note: pocket has never seen 'why'; it knows")


def test_options_are_those_of_generate():
    result = run("/exit\n", "pocket-large", "--exit", "qexit", "--q", "0.4", "--after", "drop")
    assert result.stdout.startswith("exit            qexit, q = 0.4, after exit: drop")
    cut = run(f"{FIRST}\n", "--max-new-tokens", "3")
    assert cut.stdout == "The hat is\n" and "3 tokens" in cut.stderr and "cut at --max-new-tokens" in cut.stderr
    for arguments in (["nothing"], ["--q", "7"], ["--temperature", "-1"], ["--exit", "fixed", "--depth", "9"]):
        refused = run("", *arguments)
        assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.stderr


def test_tokens_are_coloured_by_depth(pocket):
    screen = Screen(pocket)
    shown = screen.type(f"{FIRST}{ENTER}{CTRL_D}")
    depths = {token.depth for token in screen.conversation.turns[0].tokens if token.text}
    colours = {depth: PALETTE[round((depth - 1) / 5 * 7)] for depth in depths}
    assert len(colours) > 1
    for colour in colours.values():
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        assert f"\x1b[38;2;{red};{green};{blue}m" in shown
    assert "The hat is in the park.\n8 tokens, mean depth" in strip(shown)


def test_the_greeting_shows_model_rule_and_an_example(pocket):
    about = About(knows="hats", examples=[{"prompt": "Where is the hat?", "answer": "Here."}])
    shown = strip(Screen(pocket, about=about).type(CTRL_D))
    assert "pocket, 6 loops at full depth; margin, theta = " in shown
    assert "pocket knows hats." in shown and "Try: Where is the hat?" in shown and "/help" in shown


def test_ctrl_c_at_an_empty_prompt_says_how_to_quit_and_drops_a_line_that_was_begun(pocket):
    screen = Screen(pocket)
    shown = strip(screen.type(f"{CTRL_C}Where is{CTRL_C}{FIRST}{ENTER}{CTRL_D}"))
    assert shown.count(HOW_TO_QUIT) == 2, "in the greeting, and once more"
    assert [turn.message for turn in screen.conversation.turns] == [FIRST]


def after(count, interrupt):
    """A conversation that is interrupted after so many tokens of an answer."""

    class Interrupted(Conversation):
        def ask(self, message):
            if not count:
                interrupt()
            for number, token in enumerate(super().ask(message), start=1):
                if number == count:
                    interrupt()
                yield token

        def command(self, line):
            if line == "/stop":
                interrupt()
            return super().command(line)

    return Interrupted


def raised():
    raise KeyboardInterrupt


def lost():
    """As in a destructor, whose errors go nowhere."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "count, interrupt, reported, kept",
    [
        (3, raised, "3 tokens, stopped; what was written is kept", 3),
        (3, lost, "3 tokens, stopped; what was written is kept", 3),
        (0, raised, "the message is not kept", None),
    ],
)
def test_ctrl_c_stops_an_answer_or_a_command_alone(pocket, count, interrupt, reported, kept):
    screen, before = Screen(pocket, after(count, interrupt)), signal.getsignal(signal.SIGINT)
    shown = strip(screen.type(f"{FIRST}{ENTER}", f"/stop{ENTER}", f"/exit qexit 0.3{ENTER}", CTRL_D))
    assert reported in shown and "qexit, q = 0.3" in shown
    turns = screen.conversation.turns
    assert [(turn.generation, len(turn.tokens)) for turn in turns] == ([] if kept is None else [(None, kept)])
    assert all(f"\n{turn.answer}"[:8] in shown for turn in turns)
    assert signal.getsignal(signal.SIGINT) is before


def test_history_goes_back_and_is_kept_in_a_file_only_where_one_is_named(pocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    screen = Screen(pocket)
    screen.type(f"{FIRST}{ENTER}", f"{SECOND}{ENTER}", f"{UP}{UP}{ENTER}", CTRL_D)
    assert [turn.message for turn in screen.conversation.turns] == [FIRST, SECOND, FIRST]
    assert list(tmp_path.iterdir()) == []
    history = tmp_path / "lines"
    Screen(pocket, history=history).type(f"{FIRST}{ENTER}{CTRL_D}")
    again = Screen(pocket, history=history)
    again.type(f"{UP}{ENTER}{CTRL_D}")
    assert [turn.message for turn in again.conversation.turns] == [FIRST]
    with pytest.raises(OSError, match="lines"):
        terminal_lines(tmp_path / "nowhere" / "lines", Console(file=io.StringIO()))


def test_signs_of_a_model_that_would_steer_the_terminal_are_not_printed(pocket):
    class Steering(Conversation):
        def ask(self, message):
            for token in super().ask(message):
                yield replace(token, text="\x1b[2J")

    shown = Screen(pocket, Steering).type(f"{FIRST}{ENTER}{CTRL_D}")
    assert "\x1b[2J" not in shown and "\ufffd[2J" in shown
