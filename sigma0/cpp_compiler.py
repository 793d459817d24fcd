"""The C++ compiler of this machine, for compiled steps."""

import os
import shutil


def compiler() -> str | None:
    """The C++ compiler that inductor would call; None where there is none."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")
