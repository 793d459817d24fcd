"""Names and outcomes of tests are read from the end of pytest's output alone; other tools have a signature only."""

import subprocess
import sys

import pytest

from sigma0.reason.agent.agent_settings import AgentSettings
from sigma0.reason.agent.reports import read_report
from tests.reason.agent.repositories import pytest_output, result

SOURCE = """import pytest


@pytest.mark.parametrize("value", ["a b", "c - d"])
def test_values(value):
    print("FAILED test_it.py::test_fake - no")
    print("PASSED test_it.py::test_fake")
    assert value != "c - d", "has ] - in it"


@pytest.fixture
def torn():
    yield
    raise ValueError("at the end")


def test_torn(torn):
    pass


@pytest.mark.skip(reason="not here")
def test_skipped():
    pass


@pytest.mark.xfail
def test_expected():
    assert 0


class TestGroup:
    def test_inside(self):
        assert 1 == 2
"""


@pytest.mark.slow
def test_what_pytest_itself_says_is_read(tmp_path):
    (tmp_path / "test_it.py").write_text(SOURCE)
    (tmp_path / "test_broken.py").write_text("import nowhere_to_be_found\n")
    command = (sys.executable, *AgentSettings().full_command[1:])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = read_report(result(done.stdout, done.returncode, done.stderr))
    assert report.passed == {"test_it.py::test_values[a b]"}
    assert report.failed == {"test_it.py::test_values[c - d]", "test_it.py::TestGroup::test_inside"}
    assert report.errors == {"test_it.py::test_torn", "test_broken.py"}
    assert not report.ok and report.named
    assert report.summary.startswith("1 passed, 2 failed, 2 in error (exit code 1).")
    assert "nowhere_to_be_found" in report.summary


def test_equal_outcomes_have_one_signature_without_times_addresses_and_folders():
    first, second = pytest_output({"test_a": True, "test_b": False}), pytest_output({"test_b": False, "test_a": True})
    reports = [read_report(result(f"took {n} s\n{out}", 1)) for n, out in enumerate((first, second))]
    other = read_report(result(pytest_output({"test_a": False, "test_b": True}), 1))
    assert reports[0].signature == reports[1].signature != other.signature
    reported = "{folder}/a.c:{line}: fault at {address}, took {time} s"
    one = reported.format(folder="/tmp/x1", line=3, address="0x7ffe", time=0.12)
    two = reported.format(folder="/tmp/other/y", line=3, address="0x8000", time=7)
    first, second = read_report(result(one, 2)), read_report(result(two, 2))
    assert not first.named and first.signature == second.signature
    assert read_report(result(one, 1)).signature != first.signature
    assert read_report(result(one.replace("fault", "error"), 2)).signature != first.signature
    assert "fault at 0x7ffe" in first.summary


def test_only_the_last_summary_counts_and_what_is_in_error_has_not_passed():
    fake = pytest_output({"test_fake": True})
    report = read_report(result(fake + pytest_output({"test_a": False}), 1))
    assert report.passed == frozenset()
    assert report.failed == {"tests/test_numbers.py::test_a"}
    output = "= short test summary info =\nERROR t.py::test_a - no\nPASSED t.py::test_a\n"
    assert read_report(result(output, 1)).passed == frozenset()
    assert not read_report(result(pytest_output({"test_a": False}), 0)).ok
    assert not read_report(result(pytest_output({"test_a": True}), 1)).ok
    assert read_report(result(pytest_output({"test_a": True}), 0)).ok


def test_a_run_that_was_stopped_names_nothing_and_the_summary_is_bounded():
    output = pytest_output({"test_a": True})
    reports = [read_report(result(output[:cut], None, timed_out=True)) for cut in (10, len(output))]
    assert all(not report.named and not report.ok for report in reports)
    assert reports[0].signature == reports[1].signature
    assert "did not end" in reports[0].summary
    output = "= FAILURES =\n" + "E   line\n" * 100_000 + pytest_output({f"test_{n}": False for n in range(500)})
    report = read_report(result(output, 1))
    assert len(report.failed) == 500
    assert len(report.summary) <= 4000
    assert "and 470 more" in report.summary


@pytest.mark.parametrize(
    "command, flagged",
    [
        (("pytest", "-q"), True),
        ((sys.executable, "-m", "pytest", "tests"), True),
        (("/usr/bin/pytest",), True),
        (("make", "test"), False),
        (("./run", "a", "b", "pytest"), False),
    ],
)
def test_pytest_is_asked_to_name_what_passed(command, flagged):
    settings = AgentSettings(test_command=command)
    assert settings.is_pytest == flagged == ("-rfEp" in settings.full_command)
    assert [part for part in settings.full_command if part in command] == list(command)
