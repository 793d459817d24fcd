import pytest

from sigma0.reason.lemma import LemmaSettings
from sigma0.reason.lemma.running import objection_to
from sigma0.reason.sandbox.sandbox import RunResult


def result(ok=True, stderr="", exit_code=0, timed_out=False, run=2, held=2, cut=None):
    return RunResult(ok, "", stderr, exit_code, timed_out, run, 0.1, assertions_held=held, cut=cut)


@pytest.mark.parametrize(
    "obtained, output",
    [
        (result(run=0, held=0), "no assertion was reached"),
        (result(held=1), "1 of 2 assertions did not hold, though the code went on"),
        (
            result(False, "Traceback\nAssertionError: six", 1, held=1),
            "1 of 2 assertions did not hold: AssertionError: six",
        ),
        (result(False, "Traceback\nOSError: no disk\n", 1), "exit code 1: OSError: no disk"),
        (result(False, "", None), "it gave no reason"),
        (result(False, exit_code=None, timed_out=True), "longer than 10 s"),
        (result(False, exit_code=None, cut="output"), "the limit of output"),
        (result(False, exit_code=None, cut="memory"), "more than 512 MB"),
        (result(cut="output"), "the limit of output"),
    ],
)
def test_every_run_but_one_whose_assertions_held_has_an_objection(obtained, output):
    assert output in objection_to(obtained, LemmaSettings()) and objection_to(result(), LemmaSettings()) is None
