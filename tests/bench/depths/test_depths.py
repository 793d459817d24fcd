"""The bench of words by depth: its table, report and picture."""

import json

from typer.testing import CliRunner

from sigma0.bench.__main__ import app


def test_words_are_counted_by_the_loop_that_they_exit_at(tmp_path):
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    asked = ["depths", "pocket", "-n", "6", "--out", str(file), "--picture", str(picture)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0 and "mean loop" in result.stdout, result.output
    report = json.loads(file.read_text())
    words = report["words"]
    assert report["loops"] == 6 and [row["depth"] for row in words] == sorted(
        (row["depth"] for row in words), reverse=True
    )
    assert all(1 <= row["depth"] <= row["deepest"] <= 6 and row["count"] >= 1 for row in words)
    assert sum(row["count"] for row in words) > 12 and picture.read_bytes().startswith(b"\x89PNG")
