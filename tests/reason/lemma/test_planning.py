import json
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.lemma import (
    FINAL,
    Lemma,
    LemmaGraph,
    LemmaGraphBuilder,
    LemmaSettings,
    Questions,
    RepairStrategist,
    parse_lemmas,
)
from sigma0.reason.lemma.repair import with_new_lemmas
from sigma0.reason.trail import Trail
from tests.marks import named
from tests.reason.lemma.helpers import plan, whats

PLAN = plan(("L1", "", "Two is even."), ("FINAL", "L1", "The answer is 2.", "synthesis"))
TIDY = [("L1", "computational", (), "Two is even."), ("FINAL", "synthesis", ("L1",), "The answer is 2.")]


def facts(text):
    return [(lemma.id, lemma.type, lemma.dependencies, lemma.statement) for lemma in parse_lemmas(text)]


def test_a_plan_is_parsed_with_titles_and_prose_about_lemmas():
    assert facts(PLAN) == TIDY
    assert parse_lemmas(PLAN)[0].verification_strategy == "run it"
    changed = PLAN.replace("LEMMA L1", "Lemma L1: Two is even.").replace("STATEMENT: Two is even.\n", "")
    changed = changed.replace("DEPENDS: ", "Depends_on: ").replace("VERIFY: ", "**Verification Strategy:** ")
    assert parse_lemmas(changed) == parse_lemmas(PLAN)
    changed = PLAN.replace("STATEMENT: The answer is 2.", "STATEMENT: The answer\nLemma L1 is used (twice) for.")
    assert parse_lemmas(changed)[1].statement == "The answer Lemma L1 is used (twice) for."


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
    "changed, output",
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
        (json.dumps([{"statement": "a"}]), "has no id"),
        (json.dumps([{"id": "L1", "statement": "a"}, 3]), "holds 3 where a lemma is expected"),
        (json.dumps([{"id": "L1", "statement": ""}]), "lemma L1 lacks STATEMENT"),
        (json.dumps([{"id": "L1", "statement": "a", "type": "easy"}]), "TYPE 'easy' is none of"),
        (json.dumps([{"id": "L1", "statement": "a", "dependencies": ["what?"]}]), "which is no id"),
        *[(text, "no line of the form") for text in ("[1, 2]", '{"answer": 2}', "1. Add.\n2. Multiply.")],
        *[(text, "no line of the form") for text in ("FINAL: it is 2 (depends on L1)", "L1: a\nL2: b")],
        ("1. Read.\nThe final answer is 2.", "no line of the form"),
    ],
)
def test_what_is_no_plan_is_refused_with_a_message(changed, output):
    with pytest.raises(ValueError, match=output):
        parse_lemmas(changed)


# what may stand in place of a part of a plan
VARIANTS = {
    "LEMMA L1": ["### Lemma 1:", "**LEMMA L1: two is even**", "Lemma L1 (two is even)", "`LEMMA [L1]`"],
    "LEMMA FINAL": ["**Final Lemma**", "FINAL:", "---\n\nLEMMA FINAL", "```\nNow the last one:\n```\nLEMMA FINAL"],
    "TYPE: computational": ["TYPE: [computational]", "TYPE: computational (a small one)"],
    "DEPENDS: none": ["DEPENDS: None (it is a fact)", "DEPENDS: \u2014"],
    "DEPENDS: L1": ["**DEPENDS ON:** Lemma L1 (the fact).", "Dependencies: 1; L1", "DEPENDS: (L1), [L1]"],
}


@pytest.mark.parametrize("part", VARIANTS)
def test_a_plan_may_be_written_as_models_write_it(part):
    assert part in PLAN
    for written in VARIANTS[part]:
        with named(written):
            assert parse_lemmas(PLAN.replace(part, written)) == parse_lemmas(PLAN)


@given(st.text(max_size=300) | st.lists(st.sampled_from([*PLAN.splitlines(), "```", "", "x", "LEMMA"])).map("\n".join))
def test_any_text_is_parsed_or_refused_with_a_short_message(text):
    try:
        output = str(len(parse_lemmas(text)))
    except ValueError as error:
        output = str(error)
    assert 0 < len(output) < 400 and output != "0"


def build(replies):
    model, trail = ScriptedChat(replies), Trail()
    return LemmaGraphBuilder(Questions(model, Desk(trail), LemmaSettings())).build("What is 1 + 1?"), trail, model


def test_a_valid_plan_is_taken_at_once_or_after_it_is_put_right():
    graph, trail, model = build([PLAN])
    assert [lemma.id for lemma in graph.lemmas] == ["L1", FINAL]
    assert whats(trail) == ["planned"] and model.calls[0]["effort"] == "medium"
    graph, trail, _ = build(["no plan", PLAN])
    assert len(graph.lemmas) == 2 and whats(trail) == ["plan refused", "planned"]


@pytest.mark.parametrize(
    "bad, output",
    [
        (plan(("L1", "FINAL", "a"), ("FINAL", "L1", "b")), "go in a circle: "),
        (
            plan(*((f"L{n}", "", "a") for n in range(10)), ("FINAL", "L0", "b")),
            "11 lemmas is too long: at most 10",
        ),
        (plan(("L1", "", "a"), ("FINAL", "", "b")), "FINAL does not build on L1"),
        ("It is 2.", "no line of the form"),
    ],
)
def test_a_bad_plan_is_refused_with_its_error_and_then_fallen_back_from(bad, output):
    graph, trail, model = build([bad, bad])
    assert [(lemma.id, lemma.statement) for lemma in graph.lemmas] == [(FINAL, "What is 1 + 1?")]
    assert whats(trail) == ["plan refused", "plan refused", "fallback"]
    assert output in trail.decisions[0].why
    assert output in model.calls[1]["messages"][-1]["content"]
    assert model.calls[1]["messages"][-2] == {"role": "assistant", "content": bad}


SQUARES = [
    ("L1", "computational", (), "The square of 3 is 9"),
    ("L2", "structural", (), "The square of 4 is 16"),
    ("FINAL", "synthesis", ("L1", "L2"), "The answer is 25"),
]
ENTRIES = [
    {"id": "L1", "statement": SQUARES[0][3], "type": "computational", "dependencies": [], "verify": "multiply"},
    {"id": "L2", "statement": "The square of 4 is 16", "depends_on": None},
    {"id": "FINAL", "statement": "The answer is 25", "depends_on": ["L1", "L2"]},
]
BY_ID = {item["id"]: {key: value for key, value in item.items() if key != "id"} for item in ENTRIES}


@pytest.mark.parametrize(
    "value",
    [
        ENTRIES,
        {"lemmas": ENTRIES},
        {"problem": "What is it?", "Plan": {"lemmas": ENTRIES}},
        {"lemmas": ENTRIES[:2], "final": {"statement": "The answer is 25", "dependencies": "L1, L2"}},
        BY_ID,
        {"lemmas": BY_ID},
        [
            {"lemma": 1, "Type": "Computational", "claim": "The square of 3 is 9", "verification_strategy": "multiply"},
            {"lemma": 2, "claim": "The square of 4 is 16", "dependencies": "none", "confidence": 0.9},
            {"lemma": "final_answer", "claim": "The answer is 25", "Depends On": [1, 2]},
        ],
    ],
    ids=["list", "lemmas", "plan within", "final beside", "by id", "by id within", "other names"],
)
@pytest.mark.parametrize(
    "form", ["{}", "```json\n{}\n```", "Here is the plan:\n\n{}\n\nIt has [3] lemmas.", "Plan: {}"]
)
def test_a_plan_in_json_is_read(value, form):
    for indent in (None, 2):
        text = form.replace("{}", json.dumps(value, indent=indent))
        if form == "Plan: {}" and indent is None:
            continue
        assert facts(text) == SQUARES
        assert parse_lemmas(text)[0].verification_strategy == "multiply"


@pytest.mark.parametrize(
    "text",
    [
        """
        1. (computational) The square of 3 is 9. Verify: multiply
        2. The square of 4 is 16.
        3. FINAL: The answer is 25 (depends on 1 and 2).
        """,
        """
        Here is a plan.

        1. **L1** [computational]: The square of 3 is 9. Depends on: none.
           Verify: multiply
        2. **L2**: The square of 4 is 16 (depends on: none)

        3. **FINAL:** The answer is 25 (depends on: L1, L2)
        """,
        """
        - L1: The square of 3 is 9
          - Type: computational
          - Depends on: none
          - Verification strategy: multiply
        - L2: The square of 4 is 16
        - Final answer: The answer is 25
          - depends on L1, L2
        """,
        """
        1. Lemma 1 (computational): The square of 3 is 9. Verification: multiply
        2. Lemma 2: The square of 4 is 16.
        3. Final lemma: The answer is 25. Depends on lemmas 1 and 2.
        """,
    ],
    ids=["numbers", "bold type", "bullets", "words"],
)
def test_a_numbered_list_is_read(text):
    assert facts(dedent(text)) == SQUARES
    assert parse_lemmas(dedent(text))[0].verification_strategy == "multiply"


@pytest.mark.parametrize(
    "text", ["[\n" * 20_000, '{"lemmas": ' * 3000, "[[" * 20_000, "1. a " * 8000, "1. FINAL: " * 4000]
)
def test_a_text_that_is_hard_to_read_is_refused_all_the_same(text):
    with pytest.raises(ValueError, match=r"plan|lemma"):
        parse_lemmas(text)


GRAPH = LemmaGraph(
    (
        Lemma("L1", "The first.", status="verified"),
        Lemma("L2", "The second.", dependencies=("L1",)),
        Lemma("FINAL", "The last.", dependencies=("L2",)),
    )
)


def strategist(**settings):
    return RepairStrategist(Questions(ScriptedChat([]), Desk(Trail()), LemmaSettings(**settings)))


def test_repairs_come_first_then_a_restructuring_then_the_end():
    one = strategist(repairs=2, restructures=1)
    assert [one.next_step(failures) for failures in (1, 2, 3)] == ["repair", "repair", "restructure"]
    one.restructures_left = 0
    assert [one.next_step(failures) for failures in (1, 3)] == ["repair", "give up"]
    assert strategist(repairs=0, restructures=0).next_step(1) == "give up"


def test_new_lemmas_go_under_the_failed_one_and_no_graph_grows_over_its_limit():
    graph = with_new_lemmas(GRAPH, "L2", plan(("M1", "L1", "A step."), ("M2", "M1", "Another.")))
    assert graph["L2"].dependencies == ("L1", "M1", "M2") and graph["L2"].status == "pending"
    assert graph["L1"].status == "verified"
    assert [lemma.id for lemma in graph.order()] == ["L1", "M1", "M2", "L2", "FINAL"]
    ids = [f"L{n}" for n in range(8)]
    full = LemmaGraph((*(Lemma(item, "a") for item in ids), Lemma("FINAL", "b", dependencies=tuple(ids))))
    with pytest.raises(ValueError, match="plan of 11 lemmas"):
        with_new_lemmas(full, "L1", plan(("M1", "", "a"), ("M2", "", "b")))


@pytest.mark.parametrize(
    "text, output",
    [
        (plan(*((f"M{n}", "", "a") for n in range(4))), "4 new lemmas: at most 3"),
        (plan(("L1", "", "Again.")), "already holds L1"),
        (plan(("FINAL", "", "Again.")), "already holds FINAL"),
        (plan(("M1", "FINAL", "Backwards.")), "go in a circle"),
        (plan(("M1", "L9", "On nothing.")), "depends on L9"),
        ("No lemmas.", "no line of the form"),
    ],
)
def test_new_lemmas_that_fit_into_no_graph_are_refused(text, output):
    with pytest.raises(ValueError, match=output):
        with_new_lemmas(GRAPH, "L2", text)
