import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.lemma import FINAL, Lemma, LemmaGraph
from sigma0.reason.lemma import draw as draw_graph
from sigma0.reason.lemma.graph import MAX_STATEMENT, shortened


def graph_of(**depends):
    """A graph out of id=ids that it builds on."""
    return LemmaGraph(tuple(Lemma(item, f"about {item}", dependencies=tuple(on)) for item, on in depends.items()))


@st.composite
def graphs(draw):
    """Any valid graph, its lemmas in any order."""
    count = draw(st.integers(0, 9))
    ids = [f"L{number}" for number in range(count)]
    edges = {item: draw(st.sets(st.sampled_from(ids[:place]))) if place else set() for place, item in enumerate(ids)}
    needed = set().union(*edges.values()) if edges else set()
    edges[FINAL] = set(ids) - needed | (draw(st.sets(st.sampled_from(ids))) if ids else set())
    order = draw(st.permutations([*ids, FINAL]))
    return graph_of(**{item: sorted(edges[item]) for item in order})


@given(graphs())
def test_layers_partition_the_lemmas_and_hold_none_that_build_on_each_other(graph):
    layers = graph.layers()
    order = graph.order()
    assert sum(layers, ()) == order == LemmaGraph(graph.lemmas).order() and all(layers)
    assert {lemma.id for lemma in order} == {lemma.id for lemma in graph.lemmas} and order[-1].id == FINAL
    for number, layer in enumerate(layers):
        ids = {lemma.id for lemma in layer}
        earlier = {lemma.id for item in layers[:number] for lemma in item}
        for lemma in layer:
            assert not graph.needed_by(lemma.id) & ids
            assert set(lemma.dependencies) <= earlier


@given(graphs(), st.data())
def test_a_cycle_is_always_found_and_named(graph, data):
    lemma = data.draw(st.sampled_from(graph.lemmas))
    below = data.draw(st.sampled_from(sorted(graph.needed_by(lemma.id) | {lemma.id})))
    depends = {item.id: set(item.dependencies) for item in graph.lemmas}
    depends[below].add(lemma.id)
    with pytest.raises(ValueError, match="go in a circle") as error:
        graph_of(**{item: sorted(on) for item, on in depends.items()})
    circle = str(error.value).removeprefix("the lemmas go in a circle: ").split(" builds on ")
    assert circle[0] == circle[-1] and len(circle) >= 2
    assert all(later in depends[earlier] for earlier, later in pairwise(circle))


@given(graphs())
def test_verifying_what_is_ready_ends_with_everything_verified(graph):
    rounds = 0
    while graph.ready(graph.verified):
        rounds += 1
        for lemma in graph.ready(graph.verified):
            graph = graph.with_status(lemma.id, "verified", "it held")
    assert rounds == len(graph.layers())
    assert {lemma.status for lemma in graph.lemmas} == {"verified"}


@given(graphs())
def test_a_graph_survives_json(graph):
    graph = graph.with_status(FINAL, "failed", "no", "a proof", "7")
    assert LemmaGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


def test_equal_ids_and_unknown_keys_are_refused():
    with pytest.raises(ValueError, match="lemma FINAL stands in the plan more than once"):
        LemmaGraph((Lemma(FINAL, "one"), Lemma(FINAL, "two")))
    with pytest.raises(ValueError, match="colour"):
        Lemma.from_dict({"id": "L1", "statement": "so it is", "colour": "red"})
    with pytest.raises(ValueError, match="lemmas"):
        LemmaGraph.from_dict({"lemmas": [], "edges": []})
    with pytest.raises(ValueError, match="mapping"):
        LemmaGraph.from_dict({"lemmas": ["L1"]})


@pytest.mark.parametrize(
    "depends, output",
    [
        ({"L1": ()}, "no lemma FINAL"),
        ({}, "no lemma FINAL"),
        ({"FINAL": ("L1",)}, "FINAL depends on L1, which the plan does not hold"),
        ({"L1": (), "L2": ("L1",), "FINAL": ()}, "FINAL does not build on L1, L2"),
        ({"FINAL": ("FINAL",)}, "FINAL builds on FINAL"),
    ],
)
def test_what_is_no_graph_is_refused_with_a_message(depends, output):
    with pytest.raises(ValueError, match=output):
        graph_of(**depends)


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "l1"},
        {"id": "1"},
        {"id": "L1\n\nx"},
        {"id": "L" * 17},
        {"statement": "  "},
        {"statement": "x" * (MAX_STATEMENT + 1)},
        {"type": "guess"},
        {"status": "proved"},
        {"dependencies": ("L2", "L2")},
        {"dependencies": ("a b",)},
    ],
)
def test_a_malformed_lemma_is_refused(fields):
    with pytest.raises(ValueError, match="for Lemma"):
        Lemma(**{"id": "L1", "statement": "so it is", **fields})


def test_ready_lemmas_are_pending_on_verified_ones_and_graphs_are_never_changed_in_place():
    graph = graph_of(L1=(), L2=(), L3=("L1",), FINAL=("L2", "L3"))
    assert [lemma.id for lemma in graph.ready(())] == ["L1", "L2"]
    assert [lemma.id for lemma in graph.ready({"L1"})] == ["L2", "L3"]
    failed = graph.with_status("L2", "failed", "it did not hold")
    assert [lemma.id for lemma in failed.ready({"L1"})] == ["L3"]
    assert failed.ready({"L1", "L3"}) == ()
    graph = graph_of(FINAL=())
    longer = graph.with_lemmas(Lemma("L1", "new"), Lemma(FINAL, "on it", dependencies=("L1",)))
    assert [lemma.id for lemma in longer.lemmas] == ["L1", FINAL]
    assert graph == graph_of(FINAL=())
    with pytest.raises(ValueError, match="does not build on L1"):
        graph.with_lemmas(Lemma("L1", "new"))
    graph = graph_of(L1=(), FINAL=("L1",)).with_status("L1", "verified", "held", value="6")
    text = graph.to_mermaid()
    assert '    L1["L1: about L1 = 6"]:::verified' in text and "    L1 --> FINAL" in text


@given(st.text(min_size=1, max_size=80))
def test_no_statement_breaks_out_of_the_mermaid_text(statement):
    if not statement.strip():
        return
    text = LemmaGraph((Lemma(FINAL, statement),)).to_mermaid()
    lines = text.splitlines()
    assert lines[0] == "graph TD" and len(lines) == 6
    assert re.fullmatch(r'    FINAL\["[^"\]<>`]*"\]:::pending', lines[1])


@given(st.text(max_size=200), st.integers(5, 80))
def test_a_shortened_text_is_one_short_printable_line(text, most):
    line = shortened(text, most)
    assert len(line) <= most and line.isprintable()


GRAPH = LemmaGraph(
    (
        Lemma("L1", 'A "quoted" $\\frac{ <b> & \x01 text', status="verified", value="12"),
        Lemma("L2", "Another one that is long enough to be wrapped into two lines of the box", status="failed"),
        Lemma("FINAL", "The answer", dependencies=("L1", "L2")),
    )
)


def test_mermaid_is_written_and_other_kinds_of_file_are_refused(tmp_path):
    draw_graph(GRAPH, tmp_path / "graph.mmd")
    assert (tmp_path / "graph.mmd").read_text() == GRAPH.to_mermaid()
    with pytest.raises(ValueError, match=r"\.svg or \.mmd"):
        draw_graph(GRAPH, tmp_path / "graph.gif")


def test_svg_is_well_formed_and_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        draw_graph(GRAPH, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
