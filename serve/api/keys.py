"""API keys: several of them in a file, and their comparison in constant time."""

import hmac
import os
import stat
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from pydantic import SecretStr


def is_key(key: str) -> bool:
    """Whether a header can hold a key: it is not empty, and holds no spaces and nothing that is not printable."""
    return bool(key) and key.isprintable() and " " not in key


def read_keys(path: Path) -> tuple[SecretStr, ...]:
    """The keys of a file: one a line, without empty lines and those that begin with `#`.

    Args:
        path: Of a file that only its owner and group may read.

    Raises:
        ValueError: If it cannot be read, others may read or write it, or it holds no key or one that no header can
            hold. No key is in the message.
    """
    try:
        with path.open("rb") as file:
            # of the file that was opened: the name may be given to another one
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except OSError as error:
        raise ValueError(f"cannot read the keys in {path}: {error.strerror or error}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ValueError(f"everybody may read or write {path}, which holds keys (mode {mode:03o}): chmod 600 {path}")
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: it holds one key a line") from None
    keys = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    bad = [number for number, line in keys if not is_key(line)]
    if bad:
        raise ValueError(f"line {bad[0]} of {path} is no key: it holds spaces or signs that no header can")
    if not keys:
        raise ValueError(f"{path} holds no key: write one a line")
    return tuple(SecretStr(line) for _, line in keys)


class KeyRing:
    """Keys that clients may send.

    Args:
        keys: At least one.
    """

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._digests = [sha256(key.get_secret_value().encode()).digest() for key in keys]

    def has(self, given: bytes) -> bool:
        """Whether a key is one of them; the time says neither which one nor how much of it was right."""
        digest = sha256(given).digest()
        # all of them are compared: `any` of a generator would end at the right one
        return sum(hmac.compare_digest(digest, current) for current in self._digests) > 0
