"""The README is short, its blocks work as they stand, and so does the Python of every other text."""

import re
import shlex

import pytest

from sigma0.bench.figures.texts import texts
from sigma0.bench.pocket.items import split_of
from tests.test_cli import run
from tests.test_layout import ROOT

TEXTS = {name: (ROOT / name).read_text() for name in texts(ROOT)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def blocks(name, language):
    return [body for written, body in FENCE.findall(TEXTS[name]) if written == language]


PYTHON = [
    pytest.param(body, id=f"{name}-{index}") for name in TEXTS for index, body in enumerate(blocks(name, "python"))
]


def test_the_readme_is_short_and_there_is_python_to_run():
    assert len(TEXTS["README.md"].splitlines()) <= 150
    assert sum(block.id.startswith("README.md") for block in PYTHON) >= 2 and len(PYTHON) >= 7


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        # whoever tries it tries it again
        exec(compile(block, "Python block", "exec"), {"__name__": "__readme__"})
    capsys.readouterr()


def test_the_first_two_bash_blocks_are_the_set_up():
    first, second = blocks("README.md", "bash")[:2]
    assert "pip install" in first and "sigma0 generate" in first
    assert "pip install" in second and "pytest" in second


def test_shown_output_and_its_picture_are_what_the_command_gives(tmp_path):
    """A prompt of the micro-world's test split, and all that the command says to it today."""
    ((command, output),) = (body.split("\n", 1) for body in blocks("README.md", "console"))
    arguments = shlex.split(command.removeprefix("$ sigma0 "))
    result = run(*arguments, "--svg", str(tmp_path / "depth.svg"))
    assert result.exit_code == 0
    printed, quoted = ([line.rstrip() for line in text.strip().splitlines()] for text in (result.stdout, output))
    assert printed == quoted
    committed = (ROOT / "bench" / "results" / "depth.svg").read_text()
    assert drawn((tmp_path / "depth.svg").read_text()) == drawn(committed)
    story = re.split(r" (?=[^.]*\?$)", arguments[1])[0]
    assert split_of(story) == "test", "a prompt that the training may have seen"


def drawn(svg):
    """The words of a picture, each with the colours that it has."""
    styles = dict(re.findall(r"-(r\d+) \{ (.*?) \}", svg))
    return [(styles[style], words) for style, words in re.findall(r'<text class="[^"]*-(r\d+)"[^>]*>([^<]*)', svg)]


@pytest.mark.parametrize("name", TEXTS)
def test_every_relative_link_leads_somewhere(name):
    lost = []
    for target in LINK.findall(CODE.sub("", TEXTS[name])):
        path, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        obtained = (ROOT / name).parent / path if path else ROOT / name
        text = obtained.read_text() if heading and obtained.is_file() else ""
        # as GitHub names them in links
        known = (re.sub(r"[^\w\- ]", "", line.strip().lower()) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
        if not obtained.exists() or (heading and heading not in {line.replace(" ", "-") for line in known}):
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("name", TEXTS)
def test_every_source_that_a_text_names_is_there(name):
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("**/*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", TEXTS[name]))
    assert not {item for item in named if not any(path == item or path.endswith(f"/{item}") for path in files)}
