"""Control groups on folders that stand for the kernel's: a machine may bind its controllers elsewhere."""

import os
import shutil
from pathlib import Path

import pytest

from sigma0.reason.sandbox import cgroups
from sigma0.reason.sandbox.cgroups import make_group, usable_parent


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A hierarchy of three groups, this process in the lowest; folders are removed with their files, as there."""
    lowest = tmp_path / "top" / "slice" / "own"
    lowest.mkdir(parents=True)
    for folder in (lowest, *lowest.parents[:2]):
        (folder / "cgroup.subtree_control").write_text("cpu\n")
    (tmp_path / "cgroup").write_text("4:memory:/elsewhere\n0::/slice/own\n")
    (tmp_path / "mountinfo").write_text(
        f"30 29 0:27 / /sys rw - sysfs sysfs rw\n35 30 0:30 / {tmp_path / 'top'} rw shared:9 - cgroup2 cgroup2 rw\n"
    )
    monkeypatch.setattr(cgroups, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr(cgroups.ControlGroup, "remove", lambda group: shutil.rmtree(group.folder))
    usable_parent.cache_clear()
    yield lowest
    usable_parent.cache_clear()


def hand_down(folder):
    (folder / "cgroup.subtree_control").write_text("cpu memory pids\n")


def test_the_nearest_group_that_hands_both_controllers_down_is_used(kernel):
    assert make_group(2**20, 5) is None
    hand_down(kernel.parent)
    hand_down(kernel.parent.parent)
    usable_parent.cache_clear()
    group = make_group(123 * 2**20, 64)
    assert group.folder.parent == kernel.parent
    limits = {path.name: path.read_text() for path in group.folder.iterdir()}
    assert limits == {"memory.max": str(123 * 2**20), "memory.oom.group": "1", "pids.max": "64"}
    group.take([os.getpid()])
    assert (group.folder / "cgroup.procs").read_text() == str(os.getpid())
    group.remove()
    assert not group.folder.exists() and len(list(kernel.parent.iterdir())) == 2


def test_swap_is_forbidden_where_it_is_counted_and_an_end_for_want_of_memory_is_known(kernel, monkeypatch):
    hand_down(kernel)
    group = make_group(2**20, 5)
    for count, killed in ((0, False), (3, True)):
        (group.folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 12\noom 1\noom_kill {count}\n")
        assert group.was_killed is killed
    hand_down(kernel)
    mkdir = Path.mkdir

    def made(folder, *rest, **settings):
        mkdir(folder, *rest, **settings)
        (folder / "memory.swap.max").write_text("max")

    monkeypatch.setattr(Path, "mkdir", made)
    assert (make_group(2**20, 5).folder / "memory.swap.max").read_text() == "0"


@pytest.fixture
def first_version(kernel, tmp_path):
    """The folder of this process's group of v1's memory controller, beside those of v2."""
    folder = tmp_path / "memory" / "elsewhere"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").touch()
    with (tmp_path / "mountinfo").open("a") as mounts:
        for name in ("cpu", "memory"):
            mounts.write(f"36 30 0:31 / {tmp_path / name} rw - cgroup cgroup rw,{name}\n")
    return folder


def test_without_v2_s_the_memory_controller_of_v1_is_used(kernel, first_version):
    group = make_group(123 * 2**20, 64)
    assert group.folder.parent == first_version
    assert {path.name: path.read_text() for path in group.folder.iterdir()} == {
        "memory.limit_in_bytes": str(123 * 2**20)
    }
    for count, killed in ((0, False), (1, True)):
        (group.folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n")
        assert group.was_killed is killed
    hand_down(kernel)
    usable_parent.cache_clear()
    assert make_group(2**20, 5).folder.parent == kernel


def test_a_group_that_takes_no_process_is_passed_over_and_removed(kernel, monkeypatch):
    hand_down(kernel)
    hand_down(kernel.parent)
    take = cgroups.ControlGroup.take

    def refused(group, processes):
        if group.folder.parent == kernel:
            raise PermissionError("cgroup.procs")
        take(group, processes)

    monkeypatch.setattr(cgroups.ControlGroup, "take", refused)
    assert make_group(2**20, 5).folder.parent == kernel.parent
    assert [path.name for path in kernel.iterdir()] == ["cgroup.subtree_control"]


@pytest.mark.parametrize("text", ["4:memory:/elsewhere\n", "0::/../outside\n", "0::/not/there\n", ""])
def test_without_a_group_of_ones_own_there_is_none(kernel, tmp_path, text):
    (tmp_path / "cgroup").write_text(text)
    assert make_group(2**20, 5) is None
