"""The functions in C++ for the rows of a pass on a CPU: one library, built with the package from the sources in `cpu/`.

It needs no header of torch, holds each function once for every level of instructions, and is loaded once in a process.
Where it was not built (no compiler) torch does all that it does.
"""

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

LEVELS = ("plain", "avx2", "avx512", "avx512_bf16")
_KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "f": ctypes.c_bool}
_FOLDER = Path(__file__).with_name("cpu")


def is_available() -> bool:
    """Whether the library was built with the package."""
    return _path() is not None


def function(name: str, arguments: str, returns: str = "", keeps_lock: bool = False) -> Callable[..., Any]:
    """A function of the library, at the best level of instructions that this CPU has.

    Args:
        name: Of the function.
        arguments: A letter for the type of each argument: pointer, number (int64), double, flag.
        returns: Likewise of its result; nothing where it returns nothing.
        keeps_lock: Whether Python's lock is held, for what is too short to let go of it.
    """
    result: Any = getattr(_library(keeps_lock), f"{name}_{level()}")
    result.argtypes = [_KINDS[kind] for kind in arguments]
    result.restype = _KINDS[returns] if returns else None
    return result  # type: ignore[no-any-return]


@lru_cache
def level() -> str:
    """The level of instructions: the best that this CPU has, or a lower one that `SIGMA0_CPU_LEVEL` names.

    Raises:
        ValueError: For a level that there is not, or that this CPU has not.
    """
    best = said("best_level")
    wanted = os.environ.get("SIGMA0_CPU_LEVEL", best)
    known = LEVELS[: LEVELS.index(best) + 1]
    if wanted not in known:
        raise ValueError(f"SIGMA0_CPU_LEVEL={wanted!r}: this CPU has {', '.join(known)}")
    return wanted


def said(name: str) -> str:
    """What the library says of itself: `best_level`, `constants`, or the fields of a structure, a line each."""
    call: Any = getattr(_library(), name)
    call.argtypes, call.restype = [], ctypes.c_char_p
    text: bytes = call()
    return text.decode()


@lru_cache
def structure(name: str) -> type[ctypes.Structure]:
    """Memory as the functions see it: `step` or `block`."""
    fields = [line.rsplit(" ", 1) for line in said(f"{name}_fields").splitlines()]
    kinds = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
    layout = [(current, kinds.get(kind, ctypes.c_void_p)) for kind, current in fields]
    return type(name, (ctypes.Structure,), {"_fields_": layout})


@lru_cache
def constants() -> dict[str, float]:
    """The numbers that the sources name, each of which is written in Python too."""
    return {name: float(value) for name, value in (line.split() for line in said("constants").splitlines())}


@lru_cache
def _path() -> Path | None:
    return next(iter(sorted(_FOLDER.glob("library.*.so"))), None)


@lru_cache
def _library(keeps_lock: bool = False) -> Any:
    """The library.

    Raises:
        RuntimeError: Where there is none, or it was built from other sources than lie beside it.
    """
    path = _path()
    if path is None:
        raise RuntimeError("the functions in C++ were not built: install sigma0 where there is a C++ compiler")
    library = (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(str(path))
    sources = sorted(_FOLDER.glob("*.h")) + sorted(_FOLDER.glob("*.cpp"))
    library.sources.restype = ctypes.c_char_p
    if sources and library.sources().decode() != sha256(b"".join(item.read_bytes() for item in sources)).hexdigest():
        raise RuntimeError(f"{path} was built from other sources: run pip install -e . again")
    return library
