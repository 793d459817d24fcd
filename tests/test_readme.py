"""The README's Python runs as it stands, and its commands are the ones CI uses."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [body for language, body in BLOCKS if language == "python"]


@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_python_blocks_run(index, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[index], f"README.md, Python block {index + 1}", "exec"), {"__name__": "__readme__"})
    capsys.readouterr()


def test_there_is_python_to_run():
    assert len(PYTHON) >= 2


def test_the_first_two_bash_blocks_are_the_set_up():
    bash = [body for language, body in BLOCKS if language == "bash"]
    assert "pip install" in bash[0]
    assert "sigma0 generate" in bash[0]
    assert "pip install" in bash[1]
    assert "pytest" in bash[1]


def test_shown_output_is_what_the_command_prints(pocket):
    """Each text of the README's sample is what the shipped model says today."""
    import sigma0

    shown = re.findall(r'^\$ sigma0 generate "(.+?)"\n(.+)$', README, re.MULTILINE)
    assert len(shown) >= 3
    for prompt, text in shown:
        assert sigma0.generate(*pocket, prompt).text.strip() == text.strip()
