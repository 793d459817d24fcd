"""Every figure of every text comes from its row, and altering any one of them is found."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sigma0.bench.figures.check import Sources, computed, faults, figures, rewritten
from sigma0.bench.figures.printed import printed, run_apart
from sigma0.bench.figures.texts import check_text, read_literals, read_text, sources, write_literals
from sigma0.cli import app

ROOT = Path(__file__).parents[3]
# of every so many figures one is altered in the fast tests, all in the exhaustive one
STEP = 60
TEXT = """# A title of 2026

It took 1.5 ms for 4 rows, as
in arXiv 2510.25741, see `--n 3` and [there](https://there.org/7).

<!-- figures: one -->
| a | 2 |
<!-- end -->

```
run --seed 5
```
"""
SOURCES = Sources(
    blocks={"one": "| a | 2 |\n"},
    sentences=[f"took {computed(1.49, '.1f')} ms for {computed(4)} rows"],
    literal={"title of 2026": 1, "arXiv 2510.25741": 1},
    code="3 7 5",
)


def run_here(arguments: Sequence[str]) -> str:
    """What `sigma0` prints in this process, which has imported torch."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def all_sources() -> Iterator[dict[str, Sources | str]]:
    printed.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sigma0.bench.figures.printed.run_apart", run_here)
        yield sources(ROOT)
    printed.cache_clear()


def test_a_command_prints_the_same_in_a_process_of_its_own():
    assert printed("sigma0 --version") == run_apart(["--version"]) == run_here(["--version"])


def altered(text: str, step: int = 1) -> Iterator[tuple[int, str]]:
    """The text with one figure changed by one digit, for every so many figures, and the line of the change."""
    for match in figures(text)[::step]:
        digit = str((int(match[0][-1]) + 1) % 10)
        yield text.count("\n", 0, match.start()) + 1, text[: match.end() - 1] + digit + text[match.end() :]


@pytest.mark.slow
def test_every_figure_of_every_text_has_its_source(all_sources):
    found = [
        f"{name}:{fault.line}: {fault.text}"
        for name, source in all_sources.items()
        for fault in check_text((ROOT / name).read_text(), source)
    ]
    assert not found, "python -m sigma0.bench report --check lists these:\n" + "\n".join(found)


def test_all_texts_are_read(all_sources):
    known = {"README.md", "weights.md", "kernels/README.md", "bench/NOTES.md", "bench/results/speed.md"}
    known |= {f"sigma0/{name}/README.md" for name in ("calibrate", "decode", "ladder", "models", "signals")}
    known |= {"bench/fidelity/README.md", "bench/humaneval/README.md", "serve/README.md", "sigma0/reason/README.md"}
    assert known <= set(all_sources)
    assert sum(len(figures((ROOT / name).read_text())) for name in all_sources) > 5000


def test_an_altered_figure_is_found(all_sources):
    _altered_are_found(all_sources, STEP)


@pytest.mark.exhaustive
def test_any_altered_figure_is_found(all_sources):
    _altered_are_found(all_sources, 1)


def _altered_are_found(all_sources, step):
    missed, tried = [], 0
    for name, source in all_sources.items():
        for line, text in altered((ROOT / name).read_text(), step):
            tried += 1
            if not check_text(text, source):
                missed.append(f"{name}:{line}")
    assert tried and not missed


def test_a_small_text_holds():
    assert faults(TEXT, SOURCES) == []
    assert len(figures(TEXT)) == 8
    for line, text in altered(TEXT):
        assert faults(text, SOURCES), f"line {line} was altered"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("1.5 ms", "1.6 ms", "1.6 should be 1.5"),
        ("| a | 2 |", "| a | 3 |", "block 'one' is not as generated"),
        ("arXiv 2510.25741", "arXiv 2510.25742", "2510.25742 has no source"),
        ("--n 3", "--n 4", "figures in code are '4 7 5'"),
        ("It took", "It gave", "stands 0 times"),
        ("It took", "It took 9 s, then took", "9 has no source"),
        ("<!-- end -->", "", "blocks [] stand in the text, ['one'] are generated"),
        ("It took", "It took 1.5 ms for 4 rows and took", "stands 2 times"),
    ],
)
def test_a_fault_says_where_and_what(old, new, told):
    assert any(told in fault.text for fault in faults(TEXT.replace(old, new, 1), SOURCES))


def test_a_page_that_is_missing_or_altered_is_found(tmp_path):
    assert read_text(tmp_path, "page.md") == ""
    assert check_text("", "# A page\n") and not check_text("# A page\n", "# A page\n")


def test_every_table_of_results_is_generated(all_sources):
    """No page under `bench/results` is written by hand."""
    pages = {name for name in all_sources if name.startswith("bench/results/")}
    assert len(pages) >= 16 and all(isinstance(all_sources[name], str) for name in pages)


def test_literals_that_change_places_are_found():
    """One literal altered into another leaves both with a wrong number."""
    source = Sources(literal={"loop 1": 2, "loop 2": 1})
    assert not faults("loop 1, loop 2, loop 1", source)
    assert len(faults("loop 1, loop 2, loop 2", source)) == 2


def test_a_text_follows_its_rows():
    old = TEXT.replace("1.5 ms", "17 ms").replace("for 4 rows", "for\n40 rows").replace("| 2 |", "| 8 |")
    assert rewritten(old, SOURCES) == TEXT.replace("for 4 rows", "for\n4 rows")
    assert rewritten(TEXT, SOURCES) == TEXT


def test_literals_are_kept_as_they_are():
    text = "# a.md\ncode: 1 2\nof 3 x 4\n2 x arXiv 1\n= 5\n# b.md\n1 x 7 x 8\n"
    literals = read_literals(text.splitlines())
    assert literals["a.md"] == ({"of 3 x 4": 1, "arXiv 1": 2, "= 5": 1}, "1 2")
    assert literals["b.md"][0] == {"7 x 8": 1}
    assert read_literals(write_literals(literals).splitlines()) == literals


def test_what_is_listed_as_literal_names_no_measurement(all_sources):
    """A literal says what it counts: none is a bare time, share or speed."""
    for name, source in all_sources.items():
        if isinstance(source, Sources):
            for words in source.literal:
                assert not re.search(r"\d (ms|us|s|tokens/s|GB/s)\b", words), f"{name}: {words}"
