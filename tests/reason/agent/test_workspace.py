"""Copies are bounded and private, paths stay inside, resets restore, and patches give the copy back."""

import os
import shutil

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sigma0.reason.agent.patches import patch_between
from sigma0.reason.agent.trees import StoredFile
from sigma0.reason.agent.workspace import Workspace, WorkspaceFault, WorkspaceLimits
from tests.reason.agent.repositories import BUGGY, FILES, FIX, TOOLS, applied, contents, planted

NAMES = st.sampled_from(
    ["a.py", "b c.txt", "folder/d.py", "folder/é ü.md", "x b/y b", "deep/er/e", "a b/a b", "--x", "dev"]
)
BLOBS = st.text(st.sampled_from("ab é\t\n\n\r\u2028\x0c-+@ "), max_size=24).map(str.encode)
TREES = st.dictionaries(NAMES, st.builds(StoredFile, BLOBS, st.just(False)), max_size=4)


@pytest.fixture
def source(tmp_path):
    return planted(tmp_path / "source")


@pytest.fixture
def workspace(source):
    with Workspace(source) as made:
        yield made


def test_the_copy_equals_the_source_with_its_rights_and_is_removed_at_the_end(source):
    with Workspace(source) as workspace:
        assert contents(workspace.folder) == contents(source)
        assert workspace.patch() == ""
        folder = workspace.folder
    assert not folder.exists()
    (source / "run.sh").write_text("true\n")
    (source / "run.sh").chmod(0o755)
    with Workspace(source) as workspace:
        workspace.edit("run.sh", "true", "false")
        assert os.access(workspace.folder / "run.sh", os.X_OK)
        (workspace.folder / "run.sh").chmod(0o644)
        assert "old mode 100755\nnew mode 100644\n" in workspace.patch()


def test_a_reset_restores_deleted_changed_and_new_files_and_the_source_is_never_written(source, workspace):
    before = contents(source)
    (workspace.folder / "README.md").unlink()
    shutil.rmtree(workspace.folder / "tests")
    workspace.edit("numbers_kit/ranges.py", "max(low", "min(low")
    workspace.edit("new/file.txt", "", "text")
    workspace.reset()
    assert contents(workspace.folder) == contents(source)
    assert not (workspace.folder / "new").exists() and contents(source) == before
    assert workspace.patch() == ""


def test_folders_of_caches_environments_and_git_are_left_out(source):
    for folder in (".git", "numbers_kit/__pycache__", ".venv", "node_modules", "mine"):
        (source / folder).mkdir()
        (source / folder / "file").write_text("x")
    (source / "mine/pyvenv.cfg").write_text("")
    (source / "old.pyc").write_bytes(b"")
    with Workspace(source) as workspace:
        assert sorted(contents(workspace.folder)) == sorted(FILES)
        assert workspace.left_out == ()


def test_links_special_files_and_names_no_patch_can_carry_are_left_out_and_told(source):
    (source / "link").symlink_to("/etc")
    (source / "file-link.py").symlink_to("README.md")
    os.mkfifo(source / "pipe")
    (source / 'quo"te').write_text("x")
    (source / "line\nbreak").write_text("x")
    (source / os.fsdecode(b"\xff")).write_text("x")
    with Workspace(source) as workspace:
        assert sorted(contents(workspace.folder)) == sorted(FILES)
        assert len(workspace.left_out) == 6
        assert any("pipe" in output and "no ordinary file" in output for output in workspace.left_out)


@pytest.mark.parametrize("limits", [{"entries": 4}, {"total_bytes": 100}])
def test_sources_that_are_too_large_or_no_folder_are_refused(source, limits):
    with pytest.raises(ValueError, match=f"more than {next(iter(limits.values()))}"):
        Workspace(source, WorkspaceLimits(**limits))
    for path in (source / "missing", source / "README.md"):
        with pytest.raises(ValueError, match="cannot be read"):
            Workspace(path)


def test_links_inside_the_copy_are_not_followed(workspace, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (workspace.folder / "out").symlink_to(tmp_path)
    (workspace.folder / "direct").symlink_to(tmp_path / "secret")
    for use in (workspace.read, lambda path: workspace.edit(path, "secret", "x"), workspace.list):
        for path in ("out/secret", "direct"):
            with pytest.raises(WorkspaceFault, match="symbolic link"):
                use(path)
    assert (tmp_path / "secret").read_text() == "secret"


def test_other_patterns_may_be_protected_and_carriage_returns_stay(source):
    with Workspace(source, protected=("*.md",)) as workspace:
        workspace.edit("tests/test_numbers.py", "double(4)", "double(2 + 2)")
        with pytest.raises(WorkspaceFault, match="read-only"):
            workspace.edit("README.md", "`clamp`", "It")
    (source / "dos.py").write_bytes(b"a = 1\r\nb = 2\r\n")
    with Workspace(source) as workspace:
        workspace.edit("dos.py", "a = 1\nb", "a = 3\nb")
        assert (workspace.folder / "dos.py").read_bytes() == b"a = 3\r\nb = 2\r\n"


def test_an_edit_replaces_text_that_stands_there_once_and_makes_and_fills_empty_files(workspace):
    workspace.edit(FIX["path"], FIX["old"], FIX["new"])
    assert workspace.text(FIX["path"]) == BUGGY.replace(FIX["old"], FIX["new"])
    assert workspace.revision == 1
    workspace.edit("new/__init__.py", "", "")
    workspace.edit("numbers_kit/__init__.py", "", "x = 1\n")
    assert workspace.text("numbers_kit/__init__.py") == "x = 1\n"
    assert "new file mode 100644" in workspace.patch()


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ("nowhere", "x", "does not stand"),
        ("max", "min", "more than once"),
        ("low, ", "low, ", "more than once"),
        ("def clamp", "def clamp", "nothing would change"),
        ("", "x", "exists"),
        ("def clamp", "\0", "NUL"),
        ("def clamp", "x" * 600_000, "larger"),
    ],
)
def test_a_bad_edit_is_refused_and_changes_nothing(workspace, old, new, fault):
    with pytest.raises(WorkspaceFault, match=fault):
        workspace.edit("numbers_kit/ranges.py", old, new)
    assert workspace.patch() == "" and workspace.revision == 0
    with pytest.raises(WorkspaceFault, match="cannot be written"):
        workspace.edit("README.md/x", "", "x")
    # text that overlaps itself stands there more than once
    workspace.edit("a.txt", "", "aaa")
    with pytest.raises(WorkspaceFault, match="more than once"):
        workspace.edit("a.txt", "aa", "b")


def test_new_files_and_bytes_are_bounded(source):
    with Workspace(source, WorkspaceLimits(entries=9)) as workspace:
        workspace.edit("one", "", "x")
        workspace.edit("one", "x", "y")
        with pytest.raises(WorkspaceFault, match="more than 9"):
            workspace.edit("folder/two", "", "x")
    with (
        Workspace(source, WorkspaceLimits(total_bytes=1000)) as workspace,
        pytest.raises(WorkspaceFault, match="1000 b"),
    ):
        workspace.edit("one", "", "x" * 900)


def test_reading_and_listing_are_bounded_and_tell_lines_folders_and_sizes(source):
    (source / "long.txt").write_text("\n".join(map(str, range(1, 101))) + "\n")
    (source / "wide.txt").write_text("x" * 20_000)
    (source / "bytes.bin").write_bytes(b"\xff\0")
    with Workspace(source) as workspace:
        assert workspace.read("long.txt", 3, 2) == "long.txt, lines 3 to 4 of 100:\n3\n4"
        assert workspace.read("long.txt", 100, 50) == "long.txt, lines 100 to 100 of 100:\n100"
        assert len(workspace.read("wide.txt")) < 12_200 and "cut here" in workspace.read("wide.txt")
        assert workspace.read("numbers_kit/__init__.py").startswith("numbers_kit/__init__.py, lines 1 to 0 of 0")
        for path, fault in (("bytes.bin", "no UTF-8"), ("nowhere", "no file"), ("tests", "no file")):
            with pytest.raises(WorkspaceFault, match=fault):
                workspace.read(path)
        with pytest.raises(WorkspaceFault, match="none at 101"):
            workspace.read("long.txt", 101)
    for number in range(300):
        (source / f"file{number:03}").write_text("x")
    with Workspace(source) as workspace:
        lines = workspace.list().split("\n")
        assert "file000 (1 bytes)" in lines and len(lines) == 201 and lines[-1].startswith("and ")
        assert workspace.list("numbers_kit").startswith("__init__.py (0 bytes)")
        with pytest.raises(WorkspaceFault, match="no folder"):
            workspace.list("README.md")


@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=TREES, after=TREES)
@example(before={"a": StoredFile(b"x")}, after={"a": StoredFile(b"x\n")})
@example(before={"a": StoredFile(b"x\n")}, after={"a": StoredFile(b"")})
@example(before={}, after={"a b": StoredFile(b""), "c": StoredFile(b"\n")})
@example(before={"a b": StoredFile(b"")}, after={})
def test_a_patch_applies_and_gives_the_other_state(tool, before, after, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    for path, file in before.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(file.data)
    patch = patch_between(before, after)
    assert bool(patch) == (before != after)
    result = applied(patch, folder, tool) if patch else contents(folder)
    assert result == {path: file.data for path, file in after.items()}


def test_paths_lead_nowhere_outside_nor_to_what_is_read_only_or_left_out(workspace):
    outside = ("../secret", "/etc/passwd", "numbers_kit/../../secret", "", "a\0b", "a\nb", 'a"b', "\ud800")
    for path in (*outside, "x" * 300, "y/" * 700):
        for use in (workspace.list, workspace.read, lambda path: workspace.edit(path, "", "x")):
            with pytest.raises(WorkspaceFault):
                use(path)
    tests = ("tests/test_numbers.py", "./tests/test_numbers.py", "tests/new.py", "numbers_kit/tests/data.txt")
    more = ("test_more.py", "numbers_test.py", "deep/conftest.py", "pytest.py")
    for path in (*tests, *more, "pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml"):
        with pytest.raises(WorkspaceFault, match="read-only"):
            workspace.edit(path, "", "x")
    for path in (".git/hooks/pre-commit", "a/__pycache__/b.py", "x.pyc", "mine/pyvenv.cfg", "."):
        with pytest.raises(WorkspaceFault):
            workspace.edit(path, "", "x")
