"""Every command line of the texts is one that its program takes; those that need nothing else are run."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from itertools import pairwise

import pytest
import typer

from sigma0.bench.harness.arguments import EXIT_ARGUMENTS, PLACES
from sigma0.cli import app
from tests.marks import fast_if
from tests.test_cli import run
from tests.test_layout import ROOT, tomllib
from tests.test_readme import FENCE, TEXTS

# the harness's page has tests of its own, and the sandbox's block is a program
PAGES = [text for name, text in TEXTS.items() if name.endswith("README.md") and "bench/harness" not in name]
BLOCKS = [block for text in PAGES for block in FENCE.findall(text) if "<<" not in block[1]]
# programs that are not ours, with the place of the file that they read; the server's tests send what curl sends
FILES = {"cp": 1, "serve": 2, "curl": 0}
PROGRAMS = ("sigma0", "python", "pip", "torchrun", "inspect", *FILES)


def command_lines():
    """The commands of the blocks that are shell, each as its words, without comments and redirections."""
    for language, body in BLOCKS:
        if language not in ("", "bash", "console"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            if language == "console" and not line.startswith("sigma0 "):
                continue
            words = [[]]
            for word in shlex.split(line.replace(";", " ;"), comments=True):
                if word in ("&", ";"):
                    words.append([])
                else:
                    words[-1].append(word)
            for part in words:
                if part and part != ["wait"]:
                    yield tuple(part[: part.index(">")] if ">" in part else part)


COMMANDS = list(dict.fromkeys(command_lines()))


def parse(application, words):
    """Reads the words as the program would, down to the last subcommand, and runs nothing.

    Raises:
        click.UsageError: For an option or a value that it does not take.
    """
    command, words = typer.main.get_command(application), list(words)
    context = None
    # a group that runs by itself takes options of its own
    while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
        context = command.make_context("readme", words[:0], parent=context, resilient_parsing=True)
        context.resilient_parsing = False
        name, command, words = command.resolve_command(context, words)
    command.make_context(name if context else "readme", words, parent=context)


def check_pip(words):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for word in words for part in re.findall(r"\[(.*)\]", word) for name in part.split(",")]
    command = [sys.executable, "-m", "pip", words[1], "--help"]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", output.stdout))
    assert set(named) <= set(extras)


def check_inspect(words):
    settings = [word.partition("=")[0] for flag, word in pairwise(words) if flag == "-M"]
    assert words[1] == "eval" and (ROOT / words[2]).is_file() and settings
    assert set(settings) <= {*EXIT_ARGUMENTS, *PLACES}


def check_harness(words):
    cli = pytest.importorskip("lm_eval._cli")
    arguments = import_module("sigma0.bench.harness.__main__").with_device(words)
    parser = cli.HarnessCLI()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["lm_eval", *arguments])
        read = parser.parse_args()
    assert (ROOT / str(read.include_path)).is_dir() and read.device == "auto"


@pytest.mark.parametrize(
    "words",
    [fast_if("sigma0.bench.harness" not in words, words, id=" ".join(words)[:50]) for words in COMMANDS],
)
def test_every_command_is_one_that_there_is(words):
    assert words[0] in PROGRAMS, "a program that no test reads: add it here"
    if words[0] == "sigma0":
        parse(app, words[1:])
    elif words[0] == "torchrun":
        parse(app, words[words.index("sigma0.cli") + 1 :])
    elif words[0] == "pip":
        check_pip(words)
    elif words[0] == "inspect":
        check_inspect(words)
    elif words[1:3] == ("-m", "sigma0.bench.harness"):
        check_harness(words[3:])
    elif words[0] in FILES:
        assert words[0] == "curl" or (ROOT / words[FILES[words[0]]]).is_file()
    elif words[1:3] != ("-m", "pytest"):
        module = import_module(words[2])
        if hasattr(module, "__path__"):
            parse(import_module(f"{words[2]}.__main__").app, words[3:])
        else:
            application = typer.Typer()
            application.command()(module.main)
            parse(application, words[3:])


@pytest.mark.parametrize("words", [("generate", "x", "--nosuch"), ("nosuch",), ("generate", "x", "--depth", "y")])
def test_a_command_that_there_is_not_is_found_out(words):
    with pytest.raises(Exception, match=r"nosuch|valid integer") as caught:
        parse(app, words)
    assert "UsageError" in {kind.__name__ for kind in type(caught.value).__mro__}, "the words are wrong, not this test"


def named(*beginning):
    (obtained,) = [words for words in COMMANDS if words[: len(beginning)] == beginning]
    return obtained


@pytest.mark.parametrize(
    "beginning, said",
    [
        (("sigma0", "generate", "--after"), "The hat is in the park."),
        (("sigma0", "size", "ouro-1.4b"), "Computed, not measured: ouro-1.4b"),
    ],
)
def test_what_needs_nothing_else_runs(beginning, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*named(*beginning)[1:])
    assert result.exit_code == 0 and said in result.stdout


def test_the_ladder_s_line_and_its_trail_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *words, prompt = named("sigma0", "generate", "--ladder")
    assert prompt == "..."
    result = run(*words[1:], "Mary went to the park. Where is Mary?")
    assert result.exit_code == 0 and "Mary is in the park." in result.stdout
    shown = run(*named("sigma0", "trail")[1:])
    assert shown.exit_code == 0 and "pocket" in shown.stdout


@pytest.mark.exhaustive
def test_the_harness_s_line_runs_where_there_is_no_gpu():
    pytest.importorskip("lm_eval")
    words = [sys.executable, *named("python", "-m", "sigma0.bench.harness")[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"micro_world_answer.*exact_match\|↑\s*\|\s*(0\.[5-9]|1)", done.stdout)


def test_the_span_model_that_is_named_is_there():
    from sigma0.signals.grounding import support

    text, package = TEXTS["sigma0/signals/README.md"], "sigma0.signals.grounding"
    assert f"`{package}.check.check(text, context, model={package}.support.SpanSupport())`" in text
    assert hasattr(support, "SpanSupport") and "support.LettuceDetect" not in text
