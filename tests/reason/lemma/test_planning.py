import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.lemma import FINAL, LemmaGraphBuilder, LemmaSettings, Questions, parse_lemmas
from sigma0.reason.trail import Trail
from tests.reason.lemma.helpers import plan, whats

PLAN = plan(("L1", "", "Two is even."), ("FINAL", "L1", "The answer is 2.", "synthesis"))
TIDY = [("L1", "computational", (), "Two is even."), ("FINAL", "synthesis", ("L1",), "The answer is 2.")]


def facts(text):
    return [(lemma.id, lemma.type, lemma.dependencies, lemma.statement) for lemma in parse_lemmas(text)]


def test_a_plan_is_parsed():
    assert facts(PLAN) == TIDY
    assert parse_lemmas(PLAN)[0].verification_strategy == "run it"


@pytest.mark.parametrize(
    "changed",
    [
        PLAN.lower().replace("two is", "Two is").replace("the answer", "The answer"),
        PLAN.replace("\n", "\n\n"),
        "Sure, here is my plan!\n\n```text\n" + PLAN + "```\nI hope that it helps.",
        "\n".join(f"- {line}" if line else "" for line in PLAN.splitlines()),
        "\n".join(f"  * **{line.replace(': ', ':** ')}" if ": " in line else line for line in PLAN.splitlines()),
        PLAN.replace("LEMMA L1", "### LEMMA L1:").replace("LEMMA FINAL", "2. **Lemma FINAL**"),
        PLAN.replace("DEPENDS: L1", "DEPENDS: [L1]").replace("DEPENDS: none", "DEPENDS: -"),
        PLAN.replace("Two is even.", "Two\n  is even."),
        PLAN.replace("\n", "\r\n"),
    ],
)
def test_case_blank_lines_fences_bullets_and_bold_type_do_not_matter(changed):
    assert facts(changed) == TIDY


@pytest.mark.parametrize(
    "changed, told",
    [
        ("", "no line of the form 'LEMMA L1'"),
        (PLAN.replace("TYPE: computational\n", ""), "lemma L1 lacks TYPE"),
        (PLAN.replace("DEPENDS: none\nVERIFY: run it", ""), "lemma L1 lacks DEPENDS, VERIFY"),
        (PLAN.replace("Two is even.", ""), "lemma L1 lacks STATEMENT"),
        (PLAN.replace("computational", "obvious"), "TYPE 'obvious' is none of structural"),
        (PLAN.replace("DEPENDS: L1", "DEPENDS: the_first! one"), "'THE_FIRST!', which is no id"),
        (PLAN.replace("LEMMA L1", "LEMMA 1x"), "lemma id '1X' must be a letter"),
        (PLAN.replace("TYPE: synthesis", "TYPE: synthesis\nTYPE: reduction"), "TYPE stands in it twice"),
        (PLAN.replace("TYPE: computational", "We begin so.\nTYPE: computational"), "stands in none of its fields"),
        (PLAN.replace("Two is even.", "x" * 9000), "lemma L1: statement"),
    ],
)
def test_what_is_no_plan_is_refused_with_a_message(changed, told):
    with pytest.raises(ValueError, match=told):
        parse_lemmas(changed)


@given(st.text(max_size=300) | st.lists(st.sampled_from([*PLAN.splitlines(), "```", "", "x", "LEMMA"])).map("\n".join))
def test_any_text_is_parsed_or_refused_with_a_short_message(text):
    try:
        told = str(len(parse_lemmas(text)))
    except ValueError as error:
        told = str(error)
    assert 0 < len(told) < 400 and told != "0"


def build(replies):
    model, trail = ScriptedChat(replies), Trail()
    return LemmaGraphBuilder(Questions(model, Desk(trail), LemmaSettings())).build("What is 1 + 1?"), trail, model


def test_a_valid_plan_is_taken_at_once():
    graph, trail, model = build([PLAN])
    assert [lemma.id for lemma in graph.lemmas] == ["L1", FINAL]
    assert whats(trail) == ["planned"] and model.asked[0]["effort"] == "medium"


@pytest.mark.parametrize(
    "bad, told",
    [
        (plan(("L1", "FINAL", "a"), ("FINAL", "L1", "b")), "go in a circle: "),
        (plan(*((f"L{n}", "", "a") for n in range(10)), ("FINAL", "L0", "b")), "plan of 11 lemmas is too long"),
        (plan(("L1", "", "a"), ("FINAL", "", "b")), "FINAL does not build on L1"),
        ("It is 2.", "no line of the form"),
    ],
)
def test_a_bad_plan_is_refused_with_its_error_and_then_fallen_back_from(bad, told):
    graph, trail, model = build([bad, bad])
    assert [(lemma.id, lemma.statement) for lemma in graph.lemmas] == [(FINAL, "What is 1 + 1?")]
    assert whats(trail) == ["plan refused", "plan refused", "fallback"]
    assert told in trail.decisions[0].why
    assert told in model.asked[1]["messages"][-1]["content"]
    assert model.asked[1]["messages"][-2] == {"role": "assistant", "content": bad}


def test_a_plan_that_is_put_right_is_taken():
    graph, trail, _ = build(["no plan", PLAN])
    assert len(graph.lemmas) == 2 and whats(trail) == ["plan refused", "planned"]


@pytest.mark.parametrize(
    "old, new",
    [
        ("LEMMA L1", "### Lemma 1:"),
        ("LEMMA L1", "**LEMMA L1: two is even**"),
        ("LEMMA L1", "Lemma L1 (two is even)"),
        ("LEMMA L1", "`LEMMA [L1]`"),
        ("LEMMA FINAL", "**Final Lemma**"),
        ("LEMMA FINAL", "FINAL:"),
        ("LEMMA FINAL", "---\n\nLEMMA FINAL"),
        ("LEMMA FINAL", "```\nNow the last one:\n```\nLEMMA FINAL"),
        ("TYPE: computational", "TYPE: [computational]"),
        ("TYPE: computational", "TYPE: computational (a small one)"),
        ("DEPENDS: none", "DEPENDS: None (it is a fact)"),
        ("DEPENDS: none", "DEPENDS: \u2014"),
        ("DEPENDS: L1", "**DEPENDS ON:** Lemma L1 (the fact)."),
        ("DEPENDS: L1", "Dependencies: 1; L1"),
        ("DEPENDS: L1", "DEPENDS: (L1), [L1]"),
    ],
)
def test_a_plan_may_be_written_as_models_write_it(old, new):
    assert old in PLAN
    assert parse_lemmas(PLAN.replace(old, new)) == parse_lemmas(PLAN)


def test_prose_about_a_lemma_begins_none():
    changed = PLAN.replace("STATEMENT: The answer is 2.", "STATEMENT: The answer\nLemma L1 is used (twice) for.")
    assert parse_lemmas(changed)[1].statement == "The answer Lemma L1 is used (twice) for."
