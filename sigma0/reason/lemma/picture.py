"""The graph as a file: Mermaid's text, or SVG."""

from pathlib import Path

from sigma0.errors import needs_extra
from sigma0.reason.lemma.graph import Lemma, LemmaGraph, shortened, status_colour

# inches
_WIDTH, _HEIGHT = 3.2, 1.3
_LINE = 34


def draw(graph: LemmaGraph, path: Path) -> None:
    """Writes a picture of a graph.

    Args:
        graph: What is drawn.
        path: `.svg` needs matplotlib (the extra `bench`); `.mmd` is Mermaid's text.

    Raises:
        ValueError: For another suffix, or where matplotlib is missing.
    """
    if path.suffix == ".mmd":
        path.write_text(graph.to_mermaid(), encoding="utf-8")
    elif path.suffix == ".svg":
        _draw_svg(graph, path)
    else:
        raise ValueError(f"a picture of a lemma graph ends in .svg or .mmd, got {str(path)!r}")


def _draw_svg(graph: LemmaGraph, path: Path) -> None:
    with needs_extra("bench"):
        import matplotlib
        from matplotlib.figure import Figure
    layers = graph.layers()
    places = {
        lemma.id: ((column - (len(layer) - 1) / 2) * _WIDTH, -row * _HEIGHT)
        for row, layer in enumerate(layers)
        for column, lemma in enumerate(layer)
    }
    widest = max(map(len, layers))
    with matplotlib.rc_context({"svg.hashsalt": "sigma0"}):
        figure = Figure(figsize=(widest * _WIDTH + 0.4, len(layers) * _HEIGHT + 0.2))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(-(widest * _WIDTH + 0.4) / 2, (widest * _WIDTH + 0.4) / 2)
        axes.set_ylim(-len(layers) * _HEIGHT + _HEIGHT / 2 - 0.1, _HEIGHT / 2 + 0.1)
        for lemma in graph.lemmas:
            box = {"boxstyle": "round,pad=0.4", "facecolor": status_colour(lemma.status), "edgecolor": "#555555"}
            text = axes.text(*places[lemma.id], _label(lemma), ha="center", va="center", fontsize=8, bbox=box)
            # what models wrote is no mathematics for matplotlib to set
            text.set_parse_math(False)
            for dependency in lemma.dependencies:
                (x, y), (from_x, from_y) = places[lemma.id], places[dependency]
                arrow = {"arrowstyle": "->", "color": "#555555"}
                axes.annotate("", (x, y + 0.4), (from_x, from_y - 0.4), arrowprops=arrow)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _label(lemma: Lemma) -> str:
    value = "" if lemma.value is None else f" = {shortened(lemma.value, 12)}"
    statement = shortened(lemma.statement, 2 * _LINE)
    lines = [f"{lemma.id}, {lemma.status}{value}", statement[:_LINE].strip(), statement[_LINE:].strip()]
    return "\n".join(line for line in lines if line)
