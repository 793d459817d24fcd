"""Files of JSON lines: what is read, cut off and refused, by file and line."""

import json
from dataclasses import dataclass

import pytest

from sigma0.jsonl import append_line, cut_torn_line, dump_line, parse_lines, read_lines


@dataclass(frozen=True)
class Row:
    name: str
    size: int


def parse(line):
    return Row(**json.loads(line))


def test_lines_come_back_as_they_were_appended(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [Row("naïve\u2028café", 1), Row("", 2)]
    for row in rows:
        append_line(path, dump_line(row))
    assert path.read_bytes().count(b"\n") == 2
    assert read_lines(path, parse, "row") == rows


@pytest.mark.parametrize("bad", ["[" * 50_000, "7", '{"name": "x"}', "{"])
def test_a_malformed_line_is_named(tmp_path, bad):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{dump_line(Row('a', 1))}\n{bad}\n")
    with pytest.raises(ValueError, match=r"line 3 of '.*rows\.jsonl' is no row"):
        read_lines(path, parse, "row")


def test_a_torn_line_is_dropped_or_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(dump_line(Row("a", 1)) + '{"name": "b"')
    assert read_lines(path, parse, "row", drop_torn=True) == [Row("a", 1)]
    with pytest.raises(ValueError, match="line 2 of"):
        read_lines(path, parse, "row")
    cut_torn_line(path, lambda line: "name" in line, "file of rows")
    assert path.read_text() == dump_line(Row("a", 1))


def test_a_file_of_another_kind_is_not_cut(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(ValueError, match="is no file of rows"):
        cut_torn_line(path, lambda line: "name" in line, "file of rows")
    assert path.read_text() == "my notes"


def test_lines_are_parsed_one_by_one(tmp_path):
    rows = parse_lines(tmp_path / "rows.jsonl", iter([dump_line(Row("a", 1)), "{"]), parse, "row")
    assert next(rows) == Row("a", 1)
    with pytest.raises(ValueError, match="line 2 of"):
        next(rows)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("rows.jsonl", "none.jsonl"):
        with pytest.raises(ValueError, match=f"{name}.*cannot be read as UTF-8"):
            read_lines(tmp_path / name, parse, "row")
