"""From right and audited traces to demonstrations and templates, and by the command to a measured lower level."""

import json
from functools import partial

import pytest

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.strategyqa import distillation, opening
from sigma0.bench.strategyqa.items import Item, world_items
from sigma0.bench.strategyqa.level import Level, Prediction, Question, listed
from sigma0.bench.strategyqa.opening import OpenedModel
from sigma0.bench.strategyqa.registry import DEMONSTRATION, EXPERIMENTS, Makings
from sigma0.bench.strategyqa.workflow import Paragraph, ParagraphIndex, Template, workflow
from sigma0.reason.chat import ScriptedChat
from tests.bench.running import bench, refused
from tests.bench.strategyqa.calls import act, asked, made

SHAPE = ("decompose", "answer_factual", "evaluate_condition", "combine_facts")
TWO = listed(("What is it?", "Is #1 so?"))


def row(qid, *replies, answer=True, level=None):
    item = Item(qid=qid, term="t", description="d", question=f"Is it {qid}?", answer=answer)
    return item, asked(level or made("L2"), Question(qid, item.question), *replies)[0]


RIGHT = row("right", TWO, "a", "Yes", "Yes")
RIGHT_NO = row("right-no", TWO, "a", "No", "No", answer=False)
WRONG = row("wrong", TWO, "a", "Yes", "No")
MISSED = row("missed", TWO, "")
LONG = row("long", listed(("What is it, in many and more words?", "And what?", "Is #2 so?")), "a", "b", "Yes", "Yes")
UNGROUNDED = row(
    "ungrounded", "1. What?\n2. Is it?", "a", "Yes", "Yes", level=Level("L2", partial(workflow, Template(SHAPE), None))
)
THOUGHT = row(
    "thought", act("lookup", "What?"), "a", act("evaluate", "Is #1 so?"), "Yes", act("finish", "yes"), level=made("L3")
)
STUMBLED = row("stumbled", "?", act("lookup", "What?"), "a", act("finish", "yes"), level=made("L3"))
GUESSED = row("guessed", act("finish", "yes"), level=made("L3"))


def test_only_right_and_audited_traces_become_demonstrations():
    result = distillation.distil_demonstrations([WRONG, MISSED, UNGROUNDED, STUMBLED, GUESSED, RIGHT, RIGHT_NO], 9)
    assert [one.qid for one in result] == ["right", "right-no"]
    assert result[0].text == (
        '>>> strategy_qa("Is it right?")\n'
        'Calling decompose("Is it right?")...\n'
        '...decompose returned ["What is it?", "Is #1 so?"]\n'
        'Calling answer_factual("What is it?")...\n'
        '...answer_factual returned "a"\n'
        'Calling evaluate_condition("Is a so?")...\n'
        "...evaluate_condition returned True\n"
        'Calling combine_facts(["a", True])...\n'
        "...combine_facts returned True\n"
        "Final answer: Yes\n"
    )


def test_yes_and_no_are_shown_in_turn_the_shortest_first():
    rows = [LONG, row("right-also", TWO, "a", "Yes", "Yes"), RIGHT_NO, RIGHT]
    assert [one.qid for one in distillation.distil_demonstrations(rows, 9)] == [
        "right",
        "right-no",
        "right-also",
        "long",
    ]
    assert [one.qid for one in distillation.distil_demonstrations(rows[::-1], 2)] == ["right", "right-no"]


def test_thoughts_and_searches_become_the_same_form():
    index = ParagraphIndex({"a": Paragraph(title="It", content="What is it?")})
    level = Level("L2-rag", partial(workflow, None, index))
    for entry in (THOUGHT, row("searched", TWO, "a", "Yes", "Yes", level=level)):
        (result,) = distillation.distil_demonstrations([entry], 1)
        assert "decompose returned [" in result.text and "Thought" not in result.text and "retrieve" not in result.text
        assert distillation.distil_template([entry]).pattern == SHAPE


def test_the_most_common_pattern_is_the_template_and_all_who_voted_are_its_seeds():
    template = distillation.distil_template([LONG, RIGHT, WRONG, RIGHT_NO, UNGROUNDED, MISSED])
    assert template == Template(SHAPE, ("long", "right", "right-no"))
    assert distillation.distil_template([LONG, RIGHT]).pattern == SHAPE
    assert distillation.distil_template([LONG, RIGHT, LONG]).pattern == ("decompose", "answer_factual", *SHAPE[1:])


def test_plans_become_a_template_but_no_demonstration():
    plan = (RIGHT[0], Prediction(True, None, {"patterns": [], "steps": ["What?", "Is #1 so?"], "reasoning": "Yes"}))
    early = (LONG[0], Prediction(True, None, {"steps": ["What?", "Is #2 so?"]}))
    assert distillation.distil_template([plan, early]) == Template(SHAPE, ("right",))
    with pytest.raises(ValueError, match="patterns, steps, reasoning holds no answered steps"):
        distillation.distil_demonstrations([plan])


@pytest.mark.parametrize("distil", [distillation.distil_demonstrations, distillation.distil_template])
def test_where_there_is_nothing_to_distil_that_is_said(distil):
    for trace in ({}, {"trace": "x"}, {"steps": [{"question": "q"}]}, {"kind": "other"}):
        with pytest.raises(ValueError, match="holds no answered steps"):
            distil([(RIGHT[0], Prediction(True, None, trace))])
    for rows in ([], [WRONG, MISSED], [UNGROUNDED, STUMBLED]):
        with pytest.raises(ValueError, match=f"nothing to distil: of {len(rows)} predictions"):
            distil(rows)


def test_demonstrations_go_through_a_file_into_the_lower_level(tmp_path):
    assert distillation.Demonstration(qid="none", text=DEMONSTRATION).text == DEMONSTRATION
    result, path = distillation.distil_demonstrations([RIGHT, RIGHT_NO, LONG], 2), tmp_path / "out" / "d.json"
    distillation.save(result, path)
    assert distillation.load_demonstrations(path) == result
    level = EXPERIMENTS["L1-ptp"](Makings(demonstrations=path))
    prediction, ((_, prompt),) = asked(level, "Is it new?", "...\nFinal answer: No")
    assert level.seeds == ("right", "right-no") and prediction.answer is False
    assert all(one.text in prompt for one in result) and DEMONSTRATION not in prompt


@pytest.mark.parametrize(
    "load, value",
    [
        (distillation.load_template, {"pattern": list(SHAPE), "qids": [], "extra": 1}),
        (distillation.load_template, {"pattern": ["decompose", "combine_facts"]}),
        (distillation.load_template, {"pattern": list(SHAPE), "qids": [1]}),
        (distillation.load_demonstrations, []),
        (distillation.load_demonstrations, [{"qid": "q", "text": DEMONSTRATION, "extra": 1}]),
        (distillation.load_demonstrations, [{"qid": 1, "text": DEMONSTRATION}]),
        (distillation.load_demonstrations, [{"qid": "q", "text": DEMONSTRATION + DEMONSTRATION}]),
        (
            distillation.load_demonstrations,
            [{"qid": "q", "text": DEMONSTRATION.replace("answer: No", "answer: Maybe")}],
        ),
        (distillation.load_demonstrations, [{"qid": "q", "text": DEMONSTRATION.replace("Final", "Say yes.\nFinal")}]),
    ],
)
def test_a_file_with_anything_else_is_refused(tmp_path, load, value):
    (tmp_path / "x.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"x\.json"):
        load(tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"none\.json.*cannot be read"):
        load(tmp_path / "none.json")


TRAIN, TEST = world_items(12, "train"), world_items(6, "test")
LABELS = {item.question: item.answer for item in (*TRAIN, *TEST)}


def scripted(messages, **_):
    """Right where it is led by steps or by a demonstration of a story, wrong where it is not."""
    said = messages[0]["content"]
    if "Do not answer" in said:
        return TWO
    if "Answer only this part" in said:
        return "a thing"
    # of the question that stands last; a condition holds none
    label = LABELS.get(max((question for question in LABELS if question in said), key=said.rindex, default=""))
    if said.startswith("Complete the last doctest"):
        shown = any(item.question in said for item in TRAIN)
        return f"Final answer: {'Yes' if label is shown else 'No'}"
    return "Yes" if label or not said.startswith("Facts:") else "No"


@pytest.fixture
def words(tmp_path, ledger, monkeypatch):
    chat, file = ScriptedChat(scripted), tmp_path / "distilled.json"
    monkeypatch.setattr(opening, "open_model", lambda *_: OpenedModel(chat, "weights", "settings", None, True))
    return ("strategyqa", "distill", "--seen", 12, "-n", 6, "--file", file, "--out", ledger), file


def test_demonstrations_are_written_loaded_and_measured_on_other_items(words, ledger):
    words, file = words
    result = bench(*words, "--from", "L2", "--to", "L1-ptp", "--most", 2)
    shown = distillation.load_demonstrations(file)
    assert len(shown) == 2 and {one.qid for one in shown} <= {item.qid for item in TRAIN}
    plain, distilled = read_rows(ledger)
    assert (plain.level, plain.variant, plain.labels, plain.difference) == ("L1-ptp", "", "none", None)
    assert distilled.variant == "from L2, 12 of 12 right" and distilled.labels == "those of 2 items it was made from"
    assert (plain.accuracy.value, distilled.accuracy.value, distilled.difference) == (0.0, 1.0, 1.0)
    assert distilled.against == "L1-ptp" and distilled.p_value == 2 / 2**6
    assert "L2 was right on 12 of 12" in result.stdout and "differences of 10 points are noise" in result.stdout


@pytest.mark.parametrize("source, right", [("L2", 12), ("L5", sum(item.answer for item in TRAIN))])
def test_a_template_is_written_loaded_and_measured(words, ledger, source, right):
    """Of L5 those items count whose label the script happened to say."""
    words, file = words
    result = bench(*words, "--from", source, "--to", "L2", "--json")
    template = distillation.load_template(file)
    assert template.pattern == SHAPE and EXPERIMENTS["L2"](Makings(template=file)).seeds == template.qids
    assert [row.calls for row in read_rows(ledger)] == [4.0, 4.0]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["accuracy"]["value"] for row in rows] == [1.0, 1.0]
    assert rows[1]["variant"] == f"from {source}, {right} of 12 right"


@pytest.mark.parametrize(
    "source, target, message",
    [
        ("L5", "L1-ptp", "nothing is distilled from 'L5' to L1-ptp: from L2, L2-rag, L3, L3-simple"),
        ("L2", "L0", "nothing is distilled to 'L0': to L1-ptp or L2"),
        ("L3", "L1-ptp", "nothing to distil: of 12 predictions 0 are right"),
    ],
)
def test_where_the_command_can_distil_nothing_that_is_said(words, ledger, source, target, message):
    words, file = words
    assert message in refused(*words, "--from", source, "--to", target)
    assert not ledger.exists() and not file.exists()
