"""A folder as one file, to be unpacked inside a sandbox."""

import os
import tarfile
from pathlib import Path
from typing import BinaryIO


def pack(folder: Path, limit: int) -> BinaryIO:
    """Packs a folder's files, folders and links into a file in memory; sockets, pipes and devices are left out.

    Args:
        folder: Links in it stay links and lead nowhere outside.
        limit: Bytes that its files may hold together.

    Returns:
        A tar archive, at its start. All in it can be written to by whoever unpacks it.

    Raises:
        ValueError: If there is no such folder, or it holds more.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    held = 0

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal held
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        # an empty file takes room, too
        held += member.size + tarfile.BLOCKSIZE
        if held > limit:
            raise ValueError(f"{str(folder)!r} holds more than {limit} bytes: give more memory, or take files out")
        member.mode |= 0o700 if member.isdir() else 0o600
        return member

    file = os.fdopen(os.memfd_create("folder"), "w+b")
    try:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, arcname=".", filter=plain)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
