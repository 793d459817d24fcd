import os
import socket
import tarfile

import pytest

from sigma0.reason.sandbox.packing import pack


def names_of(archive):
    with archive, tarfile.open(fileobj=archive) as members:
        return {member.name: member for member in members}


def test_files_folders_and_links_are_packed_and_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b").write_bytes(b"b")
    (tmp_path / "link").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        result = names_of(pack(tmp_path, 10**6))
    assert set(result) == {".", "./a.txt", "./folder", "./folder/b", "./link"}
    assert result["./link"].issym() and result["./link"].linkname == "/etc/shadow"


def test_all_that_is_packed_can_be_written_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b").write_bytes(b"b")
    (tmp_path / "folder" / "b").chmod(0o400)
    (tmp_path / "folder").chmod(0o500)
    result = names_of(pack(tmp_path, 10**6))
    (tmp_path / "folder").chmod(0o700)
    assert result["./folder"].mode & 0o700 == 0o700 and result["./folder/b"].mode & 0o600 == 0o600


def test_folders_that_are_none_or_too_large_are_refused_even_of_empty_files(tmp_path):
    (tmp_path / "a").touch()
    for path in (tmp_path / "a", tmp_path / "none"):
        with pytest.raises(ValueError, match="no folder"):
            pack(path, 1000)
    (tmp_path / "a").write_bytes(bytes(2000))
    pack(tmp_path, 4000).close()
    with pytest.raises(ValueError, match="holds more than 2000 bytes"):
        pack(tmp_path, 2000)
    for number in range(10):
        (tmp_path / str(number)).touch()
    with pytest.raises(ValueError, match="holds more than"):
        pack(tmp_path, 5000)
