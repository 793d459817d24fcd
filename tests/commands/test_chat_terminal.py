"""`sigma0 chat` in a pseudo terminal, with the signals that keys send there."""

import os
import pty
import re
import select
import signal
import subprocess
import sys

import pytest

from sigma0.commands import chat_terminal

PATIENCE_SECONDS = 30
STORY = "Mary went to the park. The hat is with Mary. Where is the hat?"
# noise, of which this seed writes hundreds of tokens
NOISE = ("--temperature", "60", "--seed", "3", "--max-new-tokens", "1900", "--on-collapse", "ignore")
_STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\r|\x08")


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments, before=""):
        self._keyboard, screen = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{before}\nfrom sigma0.cli import run\nrun()", "chat", *arguments],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(screen),
        )
        os.close(screen)
        self._text = ""

    def type(self, keys):
        os.write(self._keyboard, keys.encode())

    def until(self, pattern, again=""):
        """What is on the screen up to the pattern, from where it was read last; `again` is typed in silence."""
        left = PATIENCE_SECONDS
        while not (match := re.search(pattern, self._text)):
            if not select.select([self._keyboard], [], [], 1)[0]:
                left -= 1
                assert left, f"no {pattern!r} within {PATIENCE_SECONDS} s: {self._text!r}"
                self.type(again)
                continue
            self._text += _STEERING.sub("", os.read(self._keyboard, 4096).decode(errors="replace"))
        before, self._text = self._text[: match.end()], self._text[match.end() :]
        return before

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


def _take_terminal(screen):
    import fcntl
    import termios

    # what Ctrl-C in this terminal interrupts
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
    # tests that run in the background were told to ignore it
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def terminal():
    opened = []

    def opens(*arguments, before=""):
        opened.append(Terminal(*arguments, before=before))
        opened[-1].until(r"/help lists the commands.*\n>")
        return opened[-1]

    yield opens
    for session in opened:
        session.close()


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_ctrl_d_quits(terminal):
    chat = terminal(*NOISE)
    chat.type("Where is the hat?\r|\x08")
    chat.until(r"hat\?\s+(\S+\s+){5}")
    chat.type("\x03")
    chat.until(r"stopped; what was written is kept\n")
    chat.type("/stats\r|\x08")
    assert "stopped by you" in chat.until("savings are not counted")
    chat.until(r"\n>")
    chat.type("\x03")
    # ahead of the next prompt the terminal would take Ctrl-D for the end of a line that nobody reads
    chat.until(r"Ctrl-D or /quit leaves\s+>")
    chat.type("\x04")
    assert chat.process.wait(PATIENCE_SECONDS) == 0


NO_EDITOR = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "prompt_toolkit" else found(name, *rest)
"""


@pytest.mark.slow
def test_a_plain_installation_has_a_conversation_too(terminal):
    chat = terminal(before=NO_EDITOR)
    chat.type(f"{STORY}\r")
    chat.until(r"The hat is in the park\.\n8 tokens, mean depth")
    # goes back to the line before the last one
    chat.type("/reset\r")
    chat.until(r"\n> ")
    chat.type("\x1b[A\x1b[A\r")
    chat.until(r"The hat is in the park\.\n8 tokens, mean depth")
    chat.until(r"\n> ")
    chat.type("Where")
    chat.until("Where")
    chat.type("\x03")
    # Python sees an interrupt that comes between two waits of `readline` only with the next one
    chat.until(r"Ctrl-D or /quit leaves\s+> ", again="\x03")
    chat.type("\x04")
    assert chat.process.wait(PATIENCE_SECONDS) == 0


def test_a_history_without_the_extra_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(chat_terminal, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'sigma0-lm[chat]'")):
        chat_terminal.terminal_lines(tmp_path / "lines", None)
