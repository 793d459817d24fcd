"""The README is short, its blocks work as they stand, and so does the Python of every other text."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sigma0.bench.figures.texts import texts
from sigma0.bench.pocket.items import split_of
from sigma0.cli import app

ROOT = Path(__file__).parent.parent
TEXTS = {name: (ROOT / name).read_text() for name in texts(ROOT)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = [
    pytest.param(body, id=f"{name}-{index}")
    for name, text in TEXTS.items()
    for index, body in enumerate(body for language, body in FENCE.findall(text) if language == "python")
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


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
    bash = [body for language, body in FENCE.findall(TEXTS["README.md"]) if language == "bash"]
    assert "pip install" in bash[0]
    assert "sigma0 generate" in bash[0]
    assert "pip install" in bash[1]
    assert "pytest" in bash[1]


def test_shown_output_and_its_picture_are_what_the_command_gives(tmp_path):
    """A prompt of the micro-world's test split, and all that the command says to it today."""
    ((command, output),) = [
        body.split("\n", 1) for language, body in FENCE.findall(TEXTS["README.md"]) if language == "console"
    ]
    arguments = shlex.split(command.removeprefix("$ sigma0 "))
    result = CliRunner().invoke(app, [*arguments, "--svg", str(tmp_path / "depth.svg")])
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


def slug(heading):
    """A heading as GitHub names it in links."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", TEXTS)
def test_every_relative_link_leads_somewhere(name):
    lost = []
    for target in LINK.findall(CODE.sub("", TEXTS[name])):
        path, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        obtained = (ROOT / name).parent / path if path else ROOT / name
        text = obtained.read_text() if heading and obtained.is_file() else ""
        if not obtained.exists() or (
            heading and heading not in map(slug, re.findall(r"^#+ (.*)$", text, re.MULTILINE))
        ):
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("name", TEXTS)
def test_every_source_that_a_text_names_is_there(name):
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("**/*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", TEXTS[name]))
    lost = {item for item in named if not any(path == item or path.endswith(f"/{item}") for path in files)}
    assert not lost
