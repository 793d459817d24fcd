"""Pages, blocks and shown output are as they are generated; tables of weights that do not ship any more say so."""

from collections import namedtuple
from pathlib import Path

import pytest

from sigma0.bench.core import conditions
from sigma0.bench.figures.pages import pages
from sigma0.bench.figures.results import Results, current
from sigma0.bench.figures.tables import blocks
from sigma0.bench.figures.texts import changed, generated, printed, rewritten, texts
from sigma0.checkpoints import shipped_models

ROOT = Path(__file__).parents[3]
# of no model that ships
OTHERS = {"fidelity-smol-loop.md", "kernels.md", "proximity.md", "strategyqa.md"}
TEXT = """# A title
<!-- figures: one -->
| a | 2 |
<!-- end -->
```console
$ sigma0 --version
old
```
"""


@pytest.mark.slow
def test_every_text_is_as_generated():
    assert list(changed(ROOT)) == [], "python -m sigma0.bench report writes these anew"


@pytest.mark.slow
def test_no_page_of_results_is_written_by_hand():
    shown = {name for name in texts(ROOT) if name.startswith("bench/results/")}
    assert shown and shown <= set(generated(ROOT))


def test_blocks_and_console_output_follow_their_sources():
    result = rewritten(TEXT, {"one": "| a | 3 |"})
    assert result == TEXT.replace("| 2 |", "| 3 |").replace("old\n", printed("sigma0 --version"))
    assert rewritten(result, {"one": "| a | 3 |"}) == result


@pytest.mark.parametrize("parts", [{}, {"one": "", "two": ""}, {"two": ""}])
def test_a_block_without_a_source_is_refused_and_a_source_without_a_block(parts):
    with pytest.raises(ValueError, match=r"stand in README\.md"):
        rewritten(TEXT, parts, "README.md")


@pytest.mark.slow
def test_no_table_that_comes_first_is_stale():
    """Others say so until they are measured again: loads and peers take longer than a model's own answers."""
    shown = blocks(Results(ROOT))
    first = {**shown["README.md"], **shown["weights.md"], **shown["bench/fidelity/README.md"]}
    assert not [name for name, text in first.items() if "**stale" in text]


Row = namedtuple("Row", "benchmark time model model_sha256 prompts", defaults=["stories"])


def test_rows_of_former_weights_go_once_such_a_run_was_made_again(monkeypatch):
    monkeypatch.setattr(conditions, "shipped_weights", {"small": "s", "large": "new"}.get)
    beside = [Row("outer", "1", "small", "s"), Row("outer", "1", "large", "old")]
    alone, anew = Row("outer", "2", "large", "old"), Row("outer", "3", "large", "new")
    other, faults = Row("speed", "1", "large", "old"), Row("outer", "4", "small", "new", "faults")
    assert current([*beside, alone, other]) == [*beside, alone, other]
    assert current([Row("outer", "1", "small", "old"), faults]) == [Row("outer", "1", "small", "old"), faults]
    # of other benches, whatever stands beside it
    assert (
        current([Row("speed", "5", "small", "s"), Row("speed", "5", "large", "new"), other])[-1].model_sha256 == "new"
    )
    # a run of the large model alone says nothing of one that stands beside a small model
    assert current([*beside, alone, anew, other]) == [*beside, anew, other]


@pytest.mark.exhaustive
def test_every_page_and_table_says_so_when_other_weights_ship(monkeypatch):
    monkeypatch.setattr(conditions, "shipped_weights", lambda name: "0" * 64 if name in shipped_models() else None)
    results = Results(ROOT)
    output = {Path(name).name: text for name, text in pages(results).items()}
    assert set(output) >= OTHERS
    assert not [name for name, text in output.items() if ("**stale" in text) == (name in OTHERS)]
    cards = {**blocks(results)["weights.md"], **blocks(results)["README.md"]}
    marked = {name for name, block in cards.items() if "**stale: other weights of pocket" in block}
    assert len(marked) >= 5 and set(cards) - marked == {"card smol-loop"}
