import io

import pytest
from rich.console import Console

from sigma0.bench.core.output import BenchTable


@pytest.mark.parametrize(
    "left, rule", [(None, "|---|---:|---:|"), ((), "|---:|---:|---:|"), (("way", "95 %"), "|---|---:|---|")]
)
def test_markdown_aligns_names_left_and_numbers_right(left, rule):
    table = BenchTable(("way", "n", "95 %"), [("full", "1", "-"), ("finish", "22", "0.9-1.1")], "not shown", left)
    assert table.markdown() == f"| way | n | 95 % |\n{rule}\n| full | 1 | - |\n| finish | 22 | 0.9-1.1 |"
    assert BenchTable(("way", "n"), []).markdown() == "| way | n |\n|---|---:|", "of no rows the head"


@pytest.mark.parametrize("compact", [False, True])
def test_a_terminal_shows_the_same_cells_aligned_likewise(compact):
    console = Console(file=io.StringIO(), width=60, record=True)
    table = BenchTable(("way", "n"), [("full", "1"), ("finish", "22")], "two ways").rich(("way",), compact)
    console.print(table)
    lines = console.export_text().splitlines()
    assert lines[0].strip() == "two ways"
    cells = [line.strip(" │").replace("│", " ").split() for line in lines if "f" in line]
    assert cells == [["full", "1"], ["finish", "22"]]
    assert [column.justify for column in table.columns] == ["left", "right"]
    assert [column.no_wrap for column in table.columns] == [True, False]


def test_a_pipe_of_80_columns_gets_every_figure_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cells = ["questions asked later", *(f"{number}.125" for number in range(1000, 1020))]
    BenchTable([f"n{number}" for number in range(21)], [cells]).show()
    words = capsys.readouterr().out.split()
    assert [word for word in words if word.endswith(".125")] == cells[1:] and "questions" in words
