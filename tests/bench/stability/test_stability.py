import json

import pytest

from sigma0.bench.stability.measure import Answer, study
from sigma0.decode.ops import STATISTICS
from tests.bench.running import bench


def answer(wrong, radius, jacobian, residual=0.1, fate="contract"):
    path = dict.fromkeys(STATISTICS, 0.0) | {"radius": radius, "residual": residual}
    return Answer(wrong, path, fate, jacobian, {"entropy": radius})


def test_sums():
    made = [
        answer(False, 0.5, 1.0),
        answer(False, 0.6, 1.1),
        answer(True, 0.9, 1.2, fate="spiral"),
        answer(True, 0.7, 0.6),
        answer(False, 5.0, 0.1, residual=0.9, fate=None),
    ]
    obtained = study("made", 6, made, resamples=20)
    assert obtained["answers"] == 5 and obtained["wrong"] == 0.4 and obtained["spoke"] == 0.8
    assert obtained["radius"][1] == pytest.approx(0.65) and obtained["jacobian"][1] == pytest.approx(1.0)
    # ranks 1 2 4 3 beside 2 3 4 1: 1 - 6 (1 + 1 + 0 + 4) / (4 * 15)
    assert obtained["rank_correlation"]["value"] == pytest.approx(0.4) and obtained["below"] == 0.75
    assert obtained["fates"] == {"contract": 0.6, "spiral": 0.2, "unknown": 0.2}
    assert obtained["wrong_by_fate"] == {"contract": pytest.approx(1 / 3), "spiral": 1.0, "unknown": 0.0}
    assert obtained["auroc"]["path: radius"]["value"] == pytest.approx(4 / 6)
    with pytest.raises(ValueError, match="at least 2"):
        study("made", 6, made[:1])


@pytest.mark.slow
def test_the_command_asks_reads_and_draws(tmp_path):
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    bench("stability", "--n", 3, "--out", file, "--picture", picture, "--inner-break")
    reported = json.loads(file.read_text())
    assert reported["answers"] == 3 and reported["total_loops"] == 6 and 0.2 < reported["jacobian"][1] < 5
    plain, broken = zip(*(reported["inner_break"][name] for name in ("depth", "passes", "rows")), strict=True)
    assert plain[0] == 6 and all(less <= more for less, more in zip(broken, plain, strict=True))
    assert (reported["inner_break"]["broken"] == 0) == (plain == broken)
    assert picture.read_text().startswith("<?xml")
