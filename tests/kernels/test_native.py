"""The library of functions in C++: what it repeats of Python, its levels of instructions, and an install without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sigma0
from sigma0.commands.doctor import _native
from sigma0.decode import lanes, settings
from sigma0.decode.ops import TORCH, operations
from sigma0.kernels import collapse, exit_state, gram, loop_end, native
from tests.marks import exhaustive, needs_library, slow

pytestmark = needs_library
ROOT = Path(__file__).parents[2]


def test_constants_are_those_of_python():
    alone = {"LANE", "SEQUENCE", "AT", "POSITION_OF", "PLANE", "LOOPS", "COLUMNS", "LINE_WIDTH", "FINISHED"}
    modules = (lanes, settings, collapse, exit_state, gram, loop_end)
    for name, value in native.constants().items():
        assert {getattr(module, name) for module in modules if hasattr(module, name)} == {value} or name in alone


def test_a_level_that_this_cpu_has_not_is_refused_and_told_by_the_doctor(monkeypatch):
    monkeypatch.setenv("SIGMA0_CPU_LEVEL", "avx1024")
    native.level.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"avx1024.*plain"):
            native.level()
        result = _native()
    finally:
        native.level.cache_clear()
    assert not result.ok and "'avx1024'" in result.detail and "plain" in result.detail


@pytest.mark.parametrize("level", [slow("plain"), exhaustive("avx2"), exhaustive("avx512")])
def test_every_level_passes_the_tests_of_the_functions(level):
    if native.LEVELS.index(level) >= native.LEVELS.index(native.said("best_level")):
        pytest.skip("not a level below this CPU's, with which the tests run by themselves")
    files = ["row_attention", "row_dot", "collapse_rows"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += [*(f"tests/kernels/test_{name}.py" for name in files)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "SIGMA0_CPU_LEVEL": level}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_it_the_same_is_written(monkeypatch, pocket):
    model, tokenizer = pocket
    story = "The hat is with Tom. Tom went to the barn. Where is the hat?"
    wanted = sigma0.generate(model, tokenizer, story)
    monkeypatch.setattr(native, "_path", lambda: None)
    operations.cache_clear()
    try:
        assert operations("auto", torch.device("cpu")) is TORCH
        assert sigma0.generate(model, tokenizer, story).text == wanted.text
        assert "install with a C++ compiler" in _native().detail
    finally:
        operations.cache_clear()


def test_a_library_of_other_sources_is_refused(monkeypatch, tmp_path):
    for path in (ROOT / "kernels/cpu").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "vectors.h").write_text("// changed\n")
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    native._path.cache_clear()
    native._library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"pip install -e \."):
            native._library()
    finally:
        native._path.cache_clear()
        native._library.cache_clear()
