"""What a test may take, and how a grid is divided: `conftest.py` in a folder of its own."""

pytest_plugins = ["pytester"]
CONFTEST = "from tests.conftest import *\nfrom tests.conftest import _cpu_seconds"
BUSY = """
import subprocess
import sys
import time

import pytest

PROGRAM = "import time\\nwhile time.process_time() < 0.12: pass"

def busy():
    end = time.process_time() + 0.12
    while time.process_time() < end:
        pass

@pytest.fixture
def prepared():
    busy()

def test_itself():
    busy()

def test_fixture(prepared):
    pass

def test_child():
    subprocess.run([sys.executable, "-S", "-c", PROGRAM], check=True)

@pytest.mark.slow
def test_slow():
    busy()

@pytest.mark.cpu(2)
def test_own_limit():
    busy()

def test_waiting():
    time.sleep(0.12)
"""
GRID = """
import pytest
from tests.marks import exhaustive, slow

@pytest.mark.grid(fast=2, slow=2)
@pytest.mark.parametrize("case", [exhaustive(0), 1, slow(2), 3, 4, 5])
def test_case(case):
    pass
"""


def test_what_takes_too_much_cpu_fails_unless_it_is_marked(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(BUSY)
    found = pytester.runpytest_inprocess("--cpu-limit", "0.08")
    found.assert_outcomes(passed=6, errors=3)
    for name in ("itself", "fixture", "child"):
        found.stdout.fnmatch_lines([f"ERROR *::test_{name}*"])
    assert "make it smaller or mark it slow" in found.stdout.str()
    pytester.runpytest_inprocess("--cpu-limit", "0", "-k", "itself").assert_outcomes(passed=1, deselected=5)


def test_cases_of_a_grid_are_divided_in_their_order(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GRID)
    for mark, cases in {"slow": "24", "exhaustive": "05", "not slow and not exhaustive": "13"}.items():
        passed, _, _ = pytester.inline_run("-m", mark).listoutcomes()
        assert "".join(report.nodeid[-2] for report in passed) == cases, mark
