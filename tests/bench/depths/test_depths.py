import json

from tests.bench.running import bench


def test_words_are_counted_by_the_loop_that_they_exit_at(tmp_path):
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    assert "mean loop" in bench("depths", "pocket", "-n", 6, "--out", file, "--picture", picture).stdout
    report = json.loads(file.read_text())
    words = report["words"]
    depths = [row["depth"] for row in words]
    assert report["loops"] == 6 and depths == sorted(depths, reverse=True)
    assert all(1 <= row["depth"] <= row["deepest"] <= 6 and row["count"] >= 1 for row in words)
    assert sum(row["count"] for row in words) > 12 and picture.read_bytes().startswith(b"\x89PNG")
