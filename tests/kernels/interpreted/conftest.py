"""These run with TRITON_INTERPRET=1 alone; `tests/kernels/test_in_interpreter.py` starts them so."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
