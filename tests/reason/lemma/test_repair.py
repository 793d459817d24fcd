import pytest

from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.lemma import Lemma, LemmaGraph, LemmaSettings, Questions, RepairStrategist
from sigma0.reason.lemma.repair import with_new_lemmas
from sigma0.reason.trail import Trail
from tests.reason.lemma.helpers import plan

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
