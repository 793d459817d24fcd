"""A sample of mutants, made and tested by cosmic-ray in a clone."""

import subprocess
from pathlib import Path

import pytest

from tests.bench.running import bench

CONFIG = """[cosmic-ray]
module-path = "half.py"
timeout = 20
test-command = 'python -c "import half; assert half.half(4) == 2 and half.LIMIT > 5"'
distributor = {name = "local"}
"""


@pytest.mark.slow
def test_what_survived_is_listed_and_the_tree_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cosmic_ray")
    source = "LIMIT = 9\n\n\ndef half(value: int) -> int:\n    return value // 2\n"
    (tmp_path / "half.py").write_text(source)
    (tmp_path / "half.toml").write_text(CONFIG)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    words = [line.split() for line in bench("mutants", "--area", "half.toml", "-n", 20).stdout.splitlines()]
    assert words[0] == ["area", "drawn", "killed", "survived"] and words[1] == ["half", "9", "5", "4"]
    # both 8 and 10 are over 5, and 4 - 2, like 4 / 2, is 2
    assert sorted(words[2:]) == [
        ["half.py:1", "core/NumberReplacer"], ["half.py:1", "core/NumberReplacer"],
        ["half.py:5", "core/ReplaceBinaryOperator_FloorDiv_Div"],
        ["half.py:5", "core/ReplaceBinaryOperator_FloorDiv_Sub"],
    ]  # fmt: skip
    again, folder = (bench("mutants", option, "half.toml", "-n", 2).stdout for option in ("--area", "--folder"))
    assert again == folder
    assert (tmp_path / "half.py").read_text() == source
