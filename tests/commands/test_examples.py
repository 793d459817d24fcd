"""`sigma0 generate` without a prompt, and with words that the model has never seen."""

import io
import shlex

import pytest
from typer.testing import CliRunner

import sigma0
from sigma0.checkpoints.about import read_about
from sigma0.cli import app
from sigma0.commands import examples
from sigma0.models.load import resolve_model

STORY = "Mary went to the kitchen. Where is Mary?"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, ["generate", *arguments], **kwargs)


@pytest.mark.parametrize("name", sigma0.shipped_models())
def test_without_a_prompt_the_examples_are_shown_as_commands_that_run(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal())
    examples.show_examples(name)
    printed = capsys.readouterr()
    assert printed.err == ""
    commands = [line for line in printed.out.splitlines() if line.startswith("sigma0 generate")]
    about = read_about(resolve_model(name))
    assert about.knows in printed.out and len(commands) == len(about.examples)
    result = CliRunner().invoke(app, shlex.split(commands[0])[1:])
    assert result.exit_code == 0 and result.stdout.strip().startswith(about.examples[0].answer)
    assert result.stderr == ""


def test_piped_input_is_not_read_unasked():
    result = run(input=STORY)
    assert result.exit_code == 2 and "Examples:" in result.stdout
    assert result.stderr == "error: no prompt: give a text, or - to read it from standard input\n"


def test_where_there_are_no_examples_it_is_one_line(tmp_path, tiny):
    assert run("--json").stderr.count("\n") == 1
    tiny.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="ships no examples"):
        examples.show_examples(str(tmp_path))
    assert "no such model" in run("--model", "nothing").stderr


def test_words_never_seen_get_one_line_on_stderr():
    plain, strange = (run(prompt, "--max-new-tokens", "4") for prompt in (STORY, f"{STORY} Why, Zoe?"))
    assert plain.stderr == ""
    assert strange.exit_code == 0 and strange.stderr.count("\n") == 1
    assert strange.stderr.startswith("note: pocket has never seen 'Why', 'Zoe'; it knows short stories")
    assert "note" not in strange.stdout


def test_the_verdict_says_that_converging_is_not_being_right():
    printed = run(STORY, "--verdict").stdout
    assert "converged       yes, which says nothing of truth: " in printed
