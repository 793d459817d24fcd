"""The figures that stand in sentences, each with the row or constant that it comes from."""

from sigma0.bench.figures.results import Results


def sentences(results: Results) -> dict[str, list[str]]:
    """Pieces of sentences of each text, with computed figures."""
    return {}
