"""The ladder on the command line."""

import json

import pytest

import sigma0
from tests.test_cli import run

STORY = "Leo is 2 years older than Tom. Tom is 4 years old. How old is Leo?"
LADDER = ["generate", "--ladder", "pocket,pocket-large"]


def test_tokens_and_their_trail(tmp_path):
    file = tmp_path / "trail.jsonl"
    result = run(*LADDER, "--policy", '{"kind": "always"}', "--budget", "large_tokens=3", "--trail", str(file), STORY)
    assert result.exit_code == 0, result.output
    assert "pocket-large    3 tokens" in result.stdout and "handed up       3 always" in result.stdout
    assert "door            abort" in result.stdout and "not tried       pocket-large: large_tokens" in result.stdout
    shown = run("trail", str(file))
    assert shown.exit_code == 0 and "all the same when made again" in " ".join(shown.stdout.split())
    decided = next(line["signs"] for line in map(json.loads, file.read_text().splitlines()) if "signs" in line)
    numbers = (decided["verdict"]["confidence"], decided["margin"], decided["entropy"], decided["verdict"]["depth"])
    assert " ".join(f"{number:.2f}" for number in numbers) in " ".join(shown.stdout.split())
    reported = json.loads(run("trail", str(file), "--json").stdout)
    assert reported["differences"] == [] and reported["outcomes"]["hand_up"] == 3
    lines = file.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if '"hand_up"' in line)
    lines[place] = lines[place].replace('"hand_up"', '"accept"')
    file.write_text("\n".join(lines))
    changed = run("trail", str(file))
    assert changed.exit_code == 1 and "hand_up in place of accept" in " ".join(changed.stdout.split())


@pytest.mark.parametrize("unit", ["token", "draft", "answer"])
def test_every_unit_is_shown_and_told_as_json(unit):
    options = [*LADDER, "--unit", unit, "--policy", '{"kind": "always"}', "--max-new-tokens", "12", STORY]
    result, shown = run(*options, "--json"), run(*options)
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    large, tokenizer = sigma0.load("pocket-large", dtype="float32")
    assert reported["unit"] == unit and reported["rung"] == "pocket-large"
    assert reported["text"] == sigma0.generate(large, tokenizer, STORY, max_new_tokens=12).text
    assert shown.exit_code == 0 and reported["text"].split("\n")[0] in shown.stdout and "door" in shown.stdout


def test_a_rule_of_the_door_reaches_model_and_ladder(tmp_path):
    asked = ["--door-rule", "certificate", "--max-new-tokens", "12", STORY]
    reported = json.loads(run("generate", "--json", *asked).stdout)
    assert reported["policy"]["rule"] == "certificate" and reported["door"] in ("converge", "escalate")
    file = tmp_path / "trail.jsonl"
    result = run("generate", "--ladder", "pocket", "--unit", "answer", "--trail", str(file), *asked)
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text().splitlines()[0])["doors"]["rule"] == "certificate"


@pytest.mark.parametrize(
    "options, message",
    [
        ([*LADDER, "--unit", "word"], "no such unit: 'word'"),
        ([*LADDER, "--budget", "tokens=3"], "budget 'tokens=3' is not name=value"),
        ([*LADDER, "--policy", "{"], "is no JSON"),
        ([*LADDER, "--policy", "[]"], "is no object"),
        ([*LADDER, "--policy", '{"kind": "mood"}'], "'mood'"),
        ([*LADDER, "--unit", "answer", "--seed", "3"], "have no meaning with --unit answer"),
        ([*LADDER, "--svg", "x.svg"], "have no meaning with --ladder"),
        ([*LADDER, "--after", "verify"], "takes tokens back"),
        (["generate", "--unit", "answer", "--budget", "calls=1"], "--unit, --budget need --ladder"),
    ],
)
def test_bad_options_are_named(options, message):
    result = run(*options, STORY)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
