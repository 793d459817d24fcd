"""Strange prompts: the file, and its rows."""

from collections import Counter

import pytest

from sigma0.bench.verdict.strange import read_strange, strange_rows


def test_the_file_holds_fifty_of_each_kind():
    prompts = read_strange()
    assert Counter(each.kind for each in prompts) == {
        "trivia": 50, "code": 50, "other words": 50, "shuffled words": 50,
    }  # fmt: skip
    assert len({each.prompt for each in prompts}) == 200
    assert "Who is the president?" in {each.prompt for each in prompts}


def test_rows_count_both_forms(asker, strange):
    rows = strange_rows(asker, strange)
    assert [(row.kind, row.form, row.prompts) for row in rows] == [
        (kind, form, n) for form in ("plain", "chat") for kind, n in (("trivia", 1), ("code", 1), ("all", 2))
    ]
    assert all(0 <= row.strange.value <= row.shut.value <= 1 for row in rows)
    assert all(0 <= row.doubted.value <= row.shut.value for row in rows)


def test_a_bad_line_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"kind": "code", "prompt": "x"}\n{"kind": "code"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_strange(file)
