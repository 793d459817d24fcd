"""Tables of weights that do not ship any more say so."""

from pathlib import Path

import pytest

from sigma0.bench.core import conditions
from sigma0.bench.figures.pages import pages
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import blocks
from sigma0.checkpoints import shipped_models

ROOT = Path(__file__).parents[3]
# of no model that ships
OTHERS = {"kernels.md", "proximity.md", "strategyqa.md"}


@pytest.mark.slow
def test_nothing_that_is_shown_is_stale() -> None:
    results = Results(ROOT)
    shown = {
        **pages(results),
        **{f"{text}: {name}": block for text, of in blocks(results).items() for name, block in of.items()},
    }
    assert not [name for name, text in shown.items() if "**stale" in text]


@pytest.mark.exhaustive
def test_every_page_and_table_says_so_when_other_weights_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "shipped_weights", lambda name: "0" * 64 if name in shipped_models() else None)
    results = Results(ROOT)
    told = {Path(name).name: text for name, text in pages(results).items()}
    assert set(told) >= OTHERS
    assert not [name for name, text in told.items() if ("**stale" in text) == (name in OTHERS)]
    cards = {**blocks(results)["weights.md"], **blocks(results)["README.md"]}
    assert len(cards) >= 5 and all("**stale: other weights of pocket" in block for block in cards.values())
