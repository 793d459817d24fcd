"""The ladder on the command line, and its bench."""

import json

import pytest
from typer.testing import CliRunner

import sigma0
from sigma0.bench.__main__ import app as bench
from sigma0.bench.ladders import Point, Setting, at_cost, cheapest, measure
from sigma0.bench.ledger import LadderRow, read_rows
from sigma0.bench.pocket.prompts import micro_world
from sigma0.cli import app
from sigma0.estimates import Estimate
from sigma0.ladder import Always, Never, Rung

STORY = "Leo is 2 years older than Tom. Tom is 4 years old. How old is Leo?"
LADDER = ["generate", "--ladder", "pocket,pocket-large"]


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_tokens_and_their_trail(tmp_path):
    file = tmp_path / "trail.jsonl"
    result = run(*LADDER, "--policy", '{"kind": "always"}', "--budget", "large_tokens=3", "--trail", str(file), STORY)
    assert result.exit_code == 0, result.output
    assert "pocket-large    3 tokens" in result.stdout and "handed up       3 always" in result.stdout
    assert "door            abort" in result.stdout and "not tried       pocket-large: large_tokens" in result.stdout
    shown = run("trail", str(file))
    assert shown.exit_code == 0 and "all the same when made again" in " ".join(shown.stdout.split())
    told = json.loads(run("trail", str(file), "--json").stdout)
    assert told["differences"] == [] and told["outcomes"]["hand_up"] == 3
    lines = file.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if '"hand_up"' in line)
    lines[place] = lines[place].replace('"hand_up"', '"accept"')
    file.write_text("\n".join(lines))
    changed = run("trail", str(file))
    assert changed.exit_code == 1 and "hand_up in place of accept" in " ".join(changed.stdout.split())


@pytest.mark.parametrize("unit", ["token", "draft", "answer"])
def test_json_of_every_unit(unit):
    result = run(*LADDER, "--unit", unit, "--policy", '{"kind": "always"}', "--max-new-tokens", "12", "--json", STORY)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    large, tokenizer = sigma0.load("pocket-large", dtype="float32")
    assert told["unit"] == unit and told["rung"] == "pocket-large"
    assert told["text"] == sigma0.generate(large, tokenizer, STORY, max_new_tokens=12).text


@pytest.mark.parametrize("unit", ["draft", "answer"])
def test_texts_are_shown(unit):
    result = run(*LADDER, "--unit", unit, "--max-new-tokens", "12", STORY)
    assert result.exit_code == 0 and "years old" in result.stdout and "door" in result.stdout


@pytest.mark.parametrize(
    "options, message",
    [
        (["--unit", "word"], "no such unit: 'word'"),
        (["--budget", "tokens=3"], "budget 'tokens=3' is not name=value"),
        (["--policy", "{"], "is no JSON"),
        (["--policy", "[]"], "is no object"),
        (["--policy", '{"kind": "mood"}'], "'mood'"),
        (["--unit", "answer", "--seed", "3"], "have no meaning with --unit answer"),
        (["--svg", "x.svg"], "have no meaning with --ladder"),
        (["--after", "verify"], "takes tokens back"),
    ],
)
def test_bad_options_are_named(options, message):
    result = run(*LADDER, *options, STORY)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_ladder_options_need_a_ladder():
    result = run("generate", "--unit", "answer", "--budget", "calls=1", STORY)
    assert result.exit_code == 2 and "--unit, --budget need --ladder" in " ".join(result.output.split())


def test_the_bench_measures_and_draws(tmp_path, monkeypatch):
    import sigma0.bench.ladder_command as command

    points = [Setting("small only", Never()), Setting("always", Always())]
    monkeypatch.setattr(command, "settings_of", lambda: points)
    ledger, picture = tmp_path / "ledger.jsonl", tmp_path / "curves.svg"
    asked = ["ladder", "--n", "3", "--q", "0.3", "--out", str(ledger), "--picture", str(picture)]
    result = CliRunner().invoke(bench, asked)
    assert result.exit_code == 0, result.output
    rows = read_rows(ledger)
    assert all(isinstance(row, LadderRow) for row in rows) and len(rows) == 3
    assert [row.family for row in rows] == ["large only", "small only", "always"]
    large, small, always = rows
    assert large.cost.value == 1.0 and small.handed_up == 0.0 and always.handed_up == 1.0
    # the text is the larger model's, its cost on top of the small one's
    assert always.accuracy == large.accuracy
    assert always.cost.value == pytest.approx(small.cost.value + 1.0, rel=0.2)
    assert small.exit_config["q"] == 0.3 and picture.read_text().startswith("<?xml")


def test_points_are_what_the_ladders_say():
    models = [sigma0.load(name, dtype="float32") for name in ("pocket", "pocket-large")]
    rungs = [Rung.local(*model, name) for model, name in zip(models, ("small", "large"), strict=True)]
    prompts = list(micro_world(3, "test", 9, hard=True))
    _, below = measure(*rungs, prompts, [Setting("small only", Never())])
    alone = [sigma0.generate(*models[0], each.content, max_new_tokens=24) for each in prompts]
    assert below.accuracy.value == sum(
        each.text.strip() == prompt.answer for each, prompt in zip(alone, prompts, strict=True)
    ) / len(prompts)
    passes = [sum(each.loop_passes + 6 for each in alone)]
    passes.append(sum(sigma0.generate(*models[1], each.content, max_new_tokens=24).loop_passes + 8 for each in prompts))
    blocks = [sum(p.numel() for p in model.model.layers.parameters()) for model, _ in models]
    assert below.cost.value == pytest.approx(passes[0] * blocks[0] / (passes[1] * blocks[1]))


def test_between_points():
    def point(cost, accuracy):
        return Point(
            Setting("x", Never()), Estimate(accuracy, (0, 1)), Estimate(cost, (0, 1)), Estimate(1, (0, 1)), 1, 0, 0
        )

    curve = [point(0.6, 0.9), point(0.4, 0.7)]
    assert at_cost(curve, 0.5) == pytest.approx(0.8) and at_cost(curve, 0.7) is None and at_cost([], 0.5) is None
    assert cheapest(curve, 0.95, point(1.0, 0.94)) is curve[0] and cheapest(curve, 0.99, point(1.0, 0.94)) is None
