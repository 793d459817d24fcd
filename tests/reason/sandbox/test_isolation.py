import sys
from pathlib import Path

import pytest

from sigma0.reason.sandbox import isolation
from sigma0.reason.sandbox.isolation import SandboxUnavailable, environment, interpreter_folders, root, spare_user


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def prefixes(monkeypatch, own, base=None):
    """Says that this interpreter lies there, or in an environment of another."""
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(base or own if "base" in name else own))


def test_an_interpreter_whose_folder_holds_the_home_folder_is_refused(monkeypatch, home):
    for prefix in (home.parent, home, Path("/")):
        monkeypatch.setattr(sys, "prefix", str(prefix))
        with pytest.raises(SandboxUnavailable, match="holds Python and the home folder"):
            interpreter_folders()


def test_folders_of_an_interpreter_are_named_once_and_the_systems_own_needs_none(monkeypatch, home):
    folder = home.parent / "a"
    prefixes(monkeypatch, folder / "venv", folder)
    assert interpreter_folders() == [str(folder)]
    prefixes(monkeypatch, "/usr")
    assert interpreter_folders() == []


def test_a_folder_behind_a_link_is_there_under_both_names(monkeypatch, tmp_path, home):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    prefixes(monkeypatch, tmp_path / "link")
    real = str(tmp_path / "real")
    assert interpreter_folders() == [str(tmp_path / "link"), real]
    options = root(1000, [])
    assert [options[i + 1] for i, item in enumerate(options) if item == "--ro-bind"][-2:] == [real, real]


def test_what_is_bound_is_to_be_read_and_nothing_is_taken_from_outside(monkeypatch):
    options = root(1000, [(7, "/run/x")])
    assert "--bind" not in options and options[-2:] == ["--chdir", "/tmp"]
    assert [options[i + 1] for i, item in enumerate(options) if item == "--remount-ro"] == ["/dev", "/"]
    devices = {options[i + 1] for i, item in enumerate(options) if item == "--dev-bind"}
    assert devices == {f"/dev/{name}" for name in isolation._DEVICES}
    assert {spare_user() for _ in range(200)}.isdisjoint({0, 65534})
    assert len({spare_user() for _ in range(20)}) > 1
    before = environment()
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("LD_PRELOAD", "x")
    assert environment() == before
