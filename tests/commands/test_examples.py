"""`sigma0 generate` without a prompt, and with words that the model has never seen."""

import re
import shlex
from functools import partial

import pytest

import sigma0
from sigma0.checkpoints import resolve_model
from sigma0.checkpoints.about import read_about
from sigma0.commands import examples
from sigma0.commands.console import verdict_lines
from sigma0.signals.verdict import digits
from tests.calibrated import calibrated, uncalibrated
from tests.test_cli import STORY
from tests.test_cli import run as command

run = partial(command, "generate")


@pytest.mark.parametrize("name", sigma0.shipped_models())
def test_without_a_prompt_the_examples_are_shown_as_commands_that_run(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    examples.show_examples(name)
    printed = capsys.readouterr()
    assert printed.err == ""
    commands = [line for line in printed.out.splitlines() if line.startswith("sigma0 generate")]
    about = read_about(resolve_model(name))
    assert about.knows in printed.out and len(commands) == len(about.examples)
    result = command(*shlex.split(commands[0])[1:])
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


def test_the_verdict_says_what_its_confidence_is(pocket):
    printed = run(STORY, "--verdict").stdout
    generation = sigma0.generate(*pocket, STORY)
    first, *_, last = verdict_lines(generation, pocket[0].confidence_model)
    assert f"\n{first}\n" in printed and f"\n{last}\n" in printed
    assert "\nconverged       yes, which says nothing of truth: " in printed
    scored = sigma0.generate(*uncalibrated(pocket), STORY)
    score = f"confidence      {digits(scored.verdict.confidence)}: exp(-mean entropy), a score that is not calibrated"
    assert verdict_lines(scored, None)[0] == score


def test_the_verdict_says_what_its_confidence_was_fitted_on(tmp_path, pocket):
    model, tokenizer = calibrated(pocket, [STORY])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    fitted = "fitted on 100 answers, AUROC 0.900, calibration error 0.020"
    for prompt, outside, door in (
        (STORY, "", "converge: confidence"),
        ("Who is the president?", ", out of calibration", "escalate: it is unlike what its confidence was calibrat"),
    ):
        printed = run(prompt, "--verdict", "--model", str(tmp_path), "--max-new-tokens", "20").stdout
        assert re.search(rf"\nconfidence      [01]\.\d+{outside}: {fitted}\n", printed), printed
        assert f"\ndoor            {door}" in printed
    unranked, _ = calibrated(pocket, [STORY], auroc=None)
    generation = sigma0.generate(unranked, tokenizer, STORY)
    assert ": fitted on 100 answers, calibration error 0.020" in verdict_lines(generation, unranked.confidence_model)[0]
