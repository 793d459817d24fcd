"""Pages, blocks and shown output are as they are generated."""

from pathlib import Path

import pytest

from sigma0.bench.figures.texts import changed, generated, printed, rewritten, texts

ROOT = Path(__file__).parents[3]
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
    pages = {name for name in texts(ROOT) if name.startswith("bench/results/")}
    assert pages and pages <= set(generated(ROOT))


def test_blocks_and_console_output_follow_their_sources():
    found = rewritten(TEXT, {"one": "| a | 3 |"})
    assert found == TEXT.replace("| 2 |", "| 3 |").replace("old\n", printed("sigma0 --version"))
    assert rewritten(found, {"one": "| a | 3 |"}) == found


@pytest.mark.parametrize("parts", [{}, {"one": "", "two": ""}, {"two": ""}])
def test_a_block_without_a_source_is_refused_and_a_source_without_a_block(parts):
    with pytest.raises(ValueError, match=r"stand in README\.md"):
        rewritten(TEXT, parts, "README.md")
