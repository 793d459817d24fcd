from xml.etree import ElementTree

import pytest

from sigma0.reason.lemma import Lemma, LemmaGraph, draw

GRAPH = LemmaGraph(
    (
        Lemma("L1", 'A "quoted" $\\frac{ <b> & \x01 text', status="verified", value="12"),
        Lemma("L2", "Another one that is long enough to be wrapped into two lines of the box", status="failed"),
        Lemma("FINAL", "The answer", dependencies=("L1", "L2")),
    )
)


def test_mermaid_is_written_and_other_kinds_of_file_are_refused(tmp_path):
    draw(GRAPH, tmp_path / "graph.mmd")
    assert (tmp_path / "graph.mmd").read_text() == GRAPH.to_mermaid()
    with pytest.raises(ValueError, match=r"\.svg or \.mmd"):
        draw(GRAPH, tmp_path / "graph.gif")


def test_svg_is_well_formed_and_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        draw(GRAPH, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
