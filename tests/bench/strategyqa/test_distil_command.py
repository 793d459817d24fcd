"""The way from a run of a higher level to a measured lower one, by the command."""

import json

import pytest
from typer.testing import CliRunner

from sigma0.bench.__main__ import app
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.strategyqa import opening
from sigma0.bench.strategyqa.distillation import load_demonstrations, load_template
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.models import Asked
from sigma0.reason.chat import ScriptedChat

TRAIN, TEST = world_items(12, "train"), world_items(6, "test")
LABELS = {item.question: item.answer for item in (*TRAIN, *TEST)}


def word(answer):
    return "Yes" if answer else "No"


def label_in(text):
    """The label of the question that stands last in a text."""
    return LABELS[max((question for question in LABELS if question in text), key=text.rindex)]


def scripted(messages, **_):
    """Right where it is led by steps or by a demonstration of a story, wrong where it is not."""
    said = messages[0]["content"]
    if "Do not answer" in said:
        return "1. What is said of it?\n2. Is #1 so?"
    if "Answer only this part" in said:
        return "a thing"
    if said.startswith("Complete the last doctest"):
        shown = any(item.question in said for item in TRAIN)
        return f"Final answer: {word(label_in(said) is shown)}"
    if said.startswith("Facts:"):
        return word(label_in(said))
    return "Yes"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; gives its result, its rows and its file."""
    chat = ScriptedChat(scripted)
    monkeypatch.setattr(opening, "open_model", lambda *_: Asked(chat, "weights", "settings", None, True))

    def run(*options):
        file, out = tmp_path / "distilled.json", tmp_path / "ledger.jsonl"
        told = ["--seen", "12", "-n", "6", "--file", str(file), "--out", str(out)]
        found = CliRunner().invoke(app, ["strategyqa", "distill", *options, *told])
        return found, read_rows(out) if out.exists() else [], file

    return run


def test_demonstrations_are_written_loaded_and_measured_on_other_items(run):
    found, rows, file = run("--from", "L2", "--to", "L1-ptp", "--most", "2")
    assert found.exit_code == 0, found.output
    shown = load_demonstrations(file)
    assert len(shown) == 2 and {one.qid for one in shown} <= {item.qid for item in TRAIN}
    plain, distilled = rows
    assert (plain.level, plain.variant, plain.labels, plain.difference) == ("L1-ptp", "", "none", None)
    assert distilled.variant == "from L2, 12 of 12 right" and distilled.labels == "those of 2 items it was made from"
    assert (plain.accuracy.value, distilled.accuracy.value, distilled.difference) == (0.0, 1.0, 1.0)
    assert distilled.against == "L1-ptp" and distilled.p_value == 2 / 2**6
    assert "L2 was right on 12 of 12" in found.stdout and "differences of 10 points are noise" in found.stdout


@pytest.mark.parametrize("source", ["L2", "L5"])
def test_a_template_is_written_loaded_and_measured(run, source):
    found, rows, file = run("--from", source, "--to", "L2", "--json")
    if source == "L5":
        # of 12 items those count whose label the script happened to say
        assert f"from L5, {sum(item.answer for item in TRAIN)} of 12 right" in found.stdout
    assert found.exit_code == 0, found.output
    pattern = ("decompose", "answer_factual", "evaluate_condition", "combine_facts")
    assert load_template(file).pattern == pattern
    assert [json.loads(line)["accuracy"]["value"] for line in found.stdout.splitlines()] == [1.0, 1.0]
    assert [row.calls for row in rows] == [4.0, 4.0]


@pytest.mark.parametrize(
    "source, target, message",
    [
        ("L5", "L1-ptp", "nothing is distilled from 'L5' to L1-ptp: from L2, L2-rag, L3, L3-simple"),
        ("L2", "L0", "nothing is distilled to 'L0': to L1-ptp or L2"),
        ("L3", "L1-ptp", "nothing to distil: of 12 predictions 0 are right"),
    ],
)
def test_where_nothing_can_be_distilled_that_is_said(run, source, target, message):
    found, rows, file = run("--from", source, "--to", target)
    assert found.exit_code == 2 and message in " ".join(found.stderr.split()), found.output
    assert not rows and not file.exists()
