"""What a test may take, and how a grid is divided: `conftest.py` in a folder of its own."""

import pytest

pytest_plugins = ["pytester"]
CONFTEST = "from tests.conftest import *\nfrom tests.conftest import _cpu_seconds"
TESTS = """
import subprocess, sys, time, pytest
from tests.marks import exhaustive, slow

BUSY = "import time\\nwhile time.process_time() < end + 0.12: pass"

@pytest.fixture
def busy():
    exec(BUSY, {"end": time.process_time()})

def test_itself(busy):
    pass

def test_child():
    subprocess.run([sys.executable, "-S", "-c", BUSY.replace("end", "0")], check=True)

@pytest.mark.slow
def test_slow(busy):
    pass

@pytest.mark.cpu(2)
def test_own_limit(busy):
    pass

@pytest.mark.cpu(0.01)
def test_small_limit(busy):
    pass

def test_waiting():
    time.sleep(0.12)

@pytest.mark.grid(fast=2, slow=2)
@pytest.mark.parametrize("case", [exhaustive(0), 1, slow(2), 3, 4, 5])
def test_numbered(case):
    pass
"""


@pytest.fixture(autouse=True)
def _folder(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)


def test_what_takes_too_much_cpu_fails_unless_it_is_marked(pytester):
    result = pytester.runpytest_inprocess("--cpu-limit", "0.08", "-k", "not numbered")
    result.assert_outcomes(passed=6, errors=3, deselected=6)
    result.stdout.fnmatch_lines(["took 0.* s of CPU, *mark it slow*", "ERROR *itself*", "ERROR *child*"])
    pytester.runpytest_inprocess("--cpu-limit", "0", "-k", "itself or small").assert_outcomes(passed=2, deselected=10)


def test_cases_of_a_grid_are_divided_in_their_order(pytester):
    for mark, cases in {"slow": "24", "exhaustive": "05", "not slow and not exhaustive": "13"}.items():
        passed, _, _ = pytester.inline_run("-m", mark, "-k", "numbered").listoutcomes()
        assert "".join(report.nodeid[-2] for report in passed) == cases, mark
