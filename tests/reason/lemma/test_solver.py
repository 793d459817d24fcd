import json
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk, Limits
from sigma0.reason.lemma import ALGSolver, Lemma, LemmaGraph, LemmaSettings
from sigma0.reason.messages import ChatFailed, Completion
from sigma0.reason.sandbox.sandbox import SandboxUnavailable
from sigma0.reason.trail import Call, Run, Trail
from tests.reason.lemma.helpers import Script, SubprocessRunner, fenced, plan, solve, whats

PROBLEM = "What is the sum of the squares of 3 and 4, plus 5?"
PLAN = plan(
    ("L1", "", "The square of 3 is 9."),
    ("L2", "", "The square of 4 is 16."),
    ("FINAL", "L1, L2", "The answer is 9 + 16 + 5.", "synthesis"),
)
GOOD = {
    "plan": PLAN,
    "prove L1": "3 * 3 = 9",
    "prove L2": "4 * 4 = 16",
    "prove FINAL": "9 + 16 + 5 = \\boxed{30}",
    "code L1": fenced("assert 3 * 3 == 9"),
    "code L2": fenced("assert 4 ** 2 == 16"),
    "code FINAL": fenced("total = sum(n * n for n in (3, 4)) + 5\nassert total == 30"),
}
FAILS = fenced("assert 3 * 3 == 10")
ADDING = {
    "restructure": plan(("M1", "", "The sum 3 + 3 + 3 is 9.")),
    "prove M1": "by adding",
    "code M1": fenced("assert sum([3] * 3) == 9"),
}


def test_everything_is_verified_at_once_or_repaired_and_told_what_failed():
    solution, trail, script = solve(PROBLEM, GOOD)
    assert (solution.answer, solution.verified, solution.best_guess) == ("30", True, None)
    assert [lemma.status for lemma in solution.graph.lemmas] == ["verified"] * 3
    assert whats(trail) == ["planned", "verified", "verified", "verified"]
    assert solution.usage.calls == 13 == len(script.calls)
    runs = [line for line in trail.lines if isinstance(line, Run)]
    assert [run.result["assertions_held"] for run in runs] == [1, 1, 1]
    json.dumps(solution.to_dict())
    solution, trail, script = solve(PROBLEM, {**GOOD, "code L1": [FAILS, GOOD["code L1"]]})
    assert solution.answer == "30"
    assert whats(trail).count("repair") == 1
    second = script.texts("prove L1")[1]
    assert "These approaches failed" in second and "1 of 1 assertions did not hold" in second and "3 * 3 = 9" in second


def test_questions_have_purposes_and_seeds_and_proofs_see_the_lemmas_they_build_on():
    _, trail, _ = solve(PROBLEM, {**GOOD, "code L1": [FAILS, GOOD["code L1"]]})
    calls = [line for line in trail.lines if isinstance(line, Call)]
    assert len({call.purpose for call in calls}) == len(calls) == len({call.seed for call in calls})
    assert "prove L1, attempt 2" in {call.purpose for call in calls}
    _, _, script = solve(PROBLEM, GOOD)
    (first,) = script.texts("prove L1")
    assert "Verified so far:\nnothing" in first and "square of 4" not in first
    (final,) = script.texts("prove FINAL")
    assert "L1: The square of 3 is 9." in final and "L2: The square of 4 is 16." in final


def test_a_flawed_lemma_runs_no_code_and_what_is_no_label_counts_as_flawed():
    said = {**GOOD, "object L1": "9 is prime", "judge L1": ["FLAWED", "SOUND"]}
    solution, trail, script = solve(PROBLEM, said)
    assert solution.verified
    assert script.counts["code L1"] == 1
    (repair,) = [item for item in trail.decisions if item.what == "repair"]
    assert "the check found it flawed: 9 is prime" in repair.why
    solution, _, _ = solve(PROBLEM, {**GOOD, "judge L1": "It is SOUND, I think"}, repairs=0, restructures=0)
    assert not solution.verified
    assert "gave no clear judgement" in solution.graph["L1"].why


def test_a_lemma_that_keeps_failing_is_restructured():
    said = {**GOOD, **ADDING, "code L1": [FAILS, FAILS, GOOD["code L1"]]}
    solution, trail, script = solve(PROBLEM, said, repairs=1)
    assert solution.answer == "30"
    assert whats(trail) == ["planned", "repair", "verified", "restructure", "verified", "verified", "verified"]
    assert solution.graph["L1"].dependencies == ("M1",)
    assert "M1: The sum 3 + 3 + 3 is 9." in script.texts("prove L1")[-1]


def test_a_restructuring_that_is_no_valid_graph_is_told_why_and_then_given_up():
    said = {**GOOD, "code L1": FAILS, "restructure": plan(("M1", "FINAL", "The answer is 30."))}
    solution, trail, script = solve(PROBLEM, said, repairs=0)
    assert not solution.verified
    refused = [item for item in trail.decisions if item.what == "plan refused"]
    assert len(refused) == 2 and "circle" in refused[0].why
    assert "go in a circle" in script.texts("restructure")[1]
    assert "no valid new lemmas came" in solution.why


def test_it_gives_up_honestly_with_a_guess_marked_as_such():
    said = {**GOOD, **ADDING, "code L1": FAILS, "guess": "Perhaps \\boxed{29}."}
    solution, trail, script = solve(PROBLEM, said, repairs=1)
    assert (solution.answer, solution.verified, solution.best_guess) == (None, False, "29")
    statuses = {"M1": "verified", "L1": "failed", "L2": "verified", "FINAL": "pending"}
    assert {lemma.id: lemma.status for lemma in solution.graph.lemmas} == statuses
    assert "it builds on L1" in solution.graph["FINAL"].why
    assert script.counts["prove L1"] == 4 and script.counts["prove FINAL"] == 0
    assert whats(trail)[-2:] == ["failed", "gave up"]
    assert "FINAL will not be attempted" in trail.decisions[-2].why
    assert "nothing vouches for" in trail.decisions[-1].why
    assert "L2: The square of 4 is 16." in script.texts("guess")[0] and "L1: " not in script.texts("guess")[0]


def test_a_final_answer_stands_by_its_box_and_its_code_and_is_else_the_guess():
    said = {**GOOD, "code FINAL": fenced("assert sum((9, 16, 5)) == 31")}
    solution, _, script = solve(PROBLEM, said, repairs=0, restructures=0)
    assert (solution.answer, solution.best_guess) == (None, "30")
    assert script.counts["guess"] == 0
    said = {**GOOD, "prove FINAL": "\\boxed{31}", "code FINAL": fenced("assert sum((9, 16, 5)) > 20")}
    solution, _, _ = solve(PROBLEM, said, repairs=0, restructures=0)
    assert not solution.verified
    assert "none of the numbers of the answer (31)" in solution.why
    solution, _, _ = solve(PROBLEM, {**GOOD, "prove FINAL": "It is 30.", "guess": "30"}, repairs=0, restructures=0)
    assert "\\boxed{}" in solution.why
    assert (solution.answer, solution.best_guess) == (None, None)


COUNTING = "How many two-digit numbers with the digits 1, 2 and 3 have digits that differ?"
ENUMERATES = """
from itertools import product
found = [pair for pair in product((1, 2, 3), repeat=2) if pair[0] != pair[1]]
assert all(len(set(pair)) == 2 for pair in found)
result = len(found)
assert result == 9
"""


def test_a_counting_problem_whose_text_claims_a_wrong_number_ends_with_the_enumerated_one():
    said = {
        "plan": "I have no plan.",
        "prove FINAL": "There are three choices, twice: \\boxed{9}",
        "code FINAL": fenced(ENUMERATES),
    }
    solution, trail, _ = solve(COUNTING, said)
    assert (solution.answer, solution.verified) == ("6", True)
    (overruled,) = [item for item in trail.decisions if item.what == "overruled"]
    assert overruled.state == {"lemma": "FINAL", "value": "6", "claimed": {"proof": "9", "code": "9"}}


def test_what_depends_on_a_counting_lemma_sees_the_enumerated_value():
    said = {
        "plan": plan(
            ("L1", "", "The number of ordered pairs of different digits among 1, 2, 3 is 9."),
            ("FINAL", "L1", "The answer is twice that.", "synthesis"),
        ),
        "prove L1": "\\boxed{9}",
        "code L1": fenced(ENUMERATES),
        "prove FINAL": "2 * 6 = \\boxed{12}",
        "code FINAL": fenced("assert 2 * 6 == 12"),
    }
    solution, trail, script = solve("Twice the pairs of different digits among 1, 2, 3?", said)
    assert solution.answer == "12"
    assert "a program counted 6; any other number for it is wrong" in script.texts("prove FINAL")[0]
    assert "\\boxed{9}" not in script.texts("prove FINAL")[0]
    overruled = next(item for item in trail.decisions if item.what == "overruled")
    assert overruled.state["claimed"] == {"statement": "9", "proof": "9", "code": "9"}


TWICE = "How many triples are there, if each of the ordered pairs of different digits among 1, 2, 3 gives two?"
FROM_COUNTS = {
    "plan": plan(
        ("L1", "", "The number of ordered pairs of different digits among 1, 2, 3."),
        ("FINAL", "L1", "How many triples there are: two for each pair.", "synthesis"),
    ),
    "prove L1": "\\boxed{6}",
    "code L1": fenced(ENUMERATES),
    "prove FINAL": "2 * 6 = \\boxed{12}",
}


@pytest.mark.parametrize(
    "code",
    [
        "result = L1 * 2\nassert result == 12",
        "count = 6\nresult = count * 2\nassert result == 12",
        "from __future__ import annotations\nresult = sum([L1, L1])\nassert result == 12",
        "counts = {'pairs': 6}\nresult = 2 * counts['pairs']\nassert result == 12",
        "def triples(pairs):\n    return pairs * 2\nresult = triples(L1)\nassert result == 12",
    ],
)
def test_final_may_compute_from_verified_enumerations(code):
    solution, _, script = solve(TWICE, {**FROM_COUNTS, "code FINAL": fenced(code)}, repairs=0, restructures=0)
    assert (solution.answer, solution.verified) == ("12", True), solution.why
    assert solution.graph.final.why == "it was computed from L1 = 6: 12"
    (asked,) = script.texts("code FINAL")
    assert "bound before your program begins: L1 = 6." in asked and "`result = L1 * 2`" in asked
    assert "bound before" not in script.texts("code L1")[0]


@pytest.mark.parametrize(
    "code, why",
    [
        ("result = 4 * 3\nassert result == 12", "comes of no enumeration: .*, or compute it from L1"),
        ("count = 9\nresult = count * 2\nassert result == 18", "comes of no enumeration"),
        ("L1 = 7\nresult = L1 * 2\nassert result == 14", "comes of no enumeration"),
        ("count = 2\nresult = count * 6\nassert result == 12", "comes of no enumeration"),
    ],
)
def test_final_may_compute_from_nothing_else(code, why):
    solution, _, _ = solve(TWICE, {**FROM_COUNTS, "code FINAL": fenced(code)}, repairs=0, restructures=0)
    assert not solution.verified
    assert re.search(why, solution.graph.final.why)


def test_a_verified_count_stands_and_a_number_of_the_problem_is_none():
    said = {**FROM_COUNTS, "code FINAL": fenced("count = 6\nresult = count * 2\nassert result == 12")}
    solution, _, _ = solve(f"{TWICE} There are 6 of us.", said, repairs=0, restructures=0)
    assert "comes of no enumeration" in solution.graph.final.why
    said = {**FROM_COUNTS, "prove FINAL": "\\boxed{6}", "code FINAL": fenced("result = L1\nassert result == 6")}
    assert solve(TWICE, said)[0].answer == "6"


def test_a_lemma_on_the_way_must_enumerate_itself():
    said = {
        **FROM_COUNTS,
        "plan": plan(
            ("L1", "", "The number of ordered pairs of different digits among 1, 2, 3."),
            ("L2", "L1", "The number of triples is twice that."),
            ("FINAL", "L2", "How many triples there are.", "synthesis"),
        ),
        "prove L2": "\\boxed{12}",
        "code L2": fenced("count = 6\nresult = count * 2\nassert result == 12"),
    }
    solution, _, script = solve(TWICE, said, repairs=0, restructures=0)
    assert "comes of no enumeration" in solution.graph["L2"].why
    assert "bound before" not in script.texts("code L2")[0]


@pytest.mark.parametrize(
    "code, why",
    [
        ("x = 9\nassert x == 9", "no assertion mentions anything computed"),
        ("try:\n    assert 3 * 3 == 8\nexcept AssertionError:\n    pass", "did not hold, though the code went on"),
        ("assert 3 * 3 == 9\nwhile True:\n    pass", "longer than 0.5 s"),
    ],
)
def test_a_lemma_whose_code_verifies_nothing_is_not_verified(code, why):
    said = {**GOOD, "code L1": fenced(code)}
    solution, _, _ = solve(PROBLEM, said, repairs=0, restructures=0, code_timeout_s=0.5 if "while" in code else 60.0)
    assert solution.graph["L1"].status == "failed"
    assert why in solution.graph["L1"].why
    assert not solution.verified


def test_vacuous_assertions_are_taken_out_and_without_a_sandbox_nothing_is_verified():
    runner = SubprocessRunner()
    code = "x = 9\nassert x == 10\nassert print('seen') is None\nassert 3 * 3 == x"
    solution, trail, _ = solve(PROBLEM, {**GOOD, "code L1": fenced(code)}, runner=runner)
    assert solution.verified
    run = next(line for line in trail.lines if isinstance(line, Run) and line.purpose.startswith("check L1"))
    assert run.result["assertions_run"] == 1 and run.result["stdout"] == "seen\n"
    assert run.code.count("assert ") == 1 and run.code in runner.ran
    runner = Mock(run=Mock(side_effect=SandboxUnavailable("no isolation passed the start-up probe")))
    solution, trail, script = solve(PROBLEM, {**GOOD, "guess": "\\boxed{30}"}, runner=runner)
    assert (solution.answer, solution.verified, solution.best_guess) == (None, False, "30")
    assert solution.graph["L1"].status == "unverified" and solution.graph["FINAL"].status == "pending"
    assert "no isolation passed" in solution.why and "no isolation passed" in solution.graph["L1"].why
    assert "unverified" in whats(trail) and script.counts["prove FINAL"] == 0


@pytest.mark.parametrize("calls", [1, 2, 5, 9, 12])
def test_a_limit_of_the_run_ends_it_honestly(calls):
    solution, trail, _ = solve(PROBLEM, GOOD, limits=Limits(calls=calls))
    assert not solution.verified and solution.answer is None
    assert solution.usage.calls == calls
    assert f"the limit of {calls} calls is reached" in solution.why
    assert {"limit", "gave up"} <= set(whats(trail))


def test_limits_before_a_plan_and_of_a_lemma_end_that_alone():
    solution, trail, _ = solve(PROBLEM, {"plan": "no"}, limits=Limits(calls=1))
    assert solution.graph is None and "there is no plan" in solution.why
    assert whats(trail) == ["plan refused", "limit", "gave up"]
    said = {**GOOD, "code L1": FAILS, "guess": "\\boxed{30}"}
    solution, _, script = solve(PROBLEM, said, repairs=50, calls_per_lemma=6)
    assert "limit of 6 questions about L1" in solution.graph["L1"].why
    assert sum(key.endswith("L1") for key, _ in script.calls) == 6
    assert solution.graph["L2"].status == "verified"


def told(trail):
    return sorted((call.purpose, call.seed, json.dumps(call.answer)) for call in trail.lines if isinstance(call, Call))


@pytest.mark.parametrize("changes", [{}, {"code L1": [FAILS, GOOD["code L1"]]}, {"code L2": FAILS, "guess": "no"}])
def test_parallel_equals_serial(changes):
    said = {**GOOD, "restructure": "no", **changes}
    serial, serial_trail, _ = solve(PROBLEM, said, workers=1)
    parallel, parallel_trail, _ = solve(PROBLEM, said, workers=4)
    assert parallel == serial
    assert told(parallel_trail) == told(serial_trail)
    assert [item for item in parallel_trail.decisions if item.what not in ("overruled", "plan refused")] == [
        item for item in serial_trail.decisions if item.what not in ("overruled", "plan refused")
    ]


@pytest.mark.parametrize("door", ["escalate", "abort"])
def test_a_proof_whose_verdict_says_so_is_asked_of_the_larger_model(door):
    above = Script({"prove L1": "3 * 3 = 9, surely"})
    solution, trail, _ = solve(PROBLEM, {**GOOD, "prove L1": Completion("eight?", door=door)}, above=above)
    assert solution.verified and solution.graph["L1"].proof == "3 * 3 = 9, surely"
    assert [key for key, _ in above.calls] == ["prove L1"]
    (risen,) = [item for item in trail.decisions if item.what == "escalate"]
    assert risen.state == {"lemma": "L1", "door": door, "model": "larger"}
    # without a larger model it is examined as it is
    solution, trail, _ = solve(PROBLEM, {**GOOD, "prove L1": Completion(GOOD["prove L1"], door="escalate")})
    assert solution.verified and "escalate" not in whats(trail)


@pytest.mark.parametrize("workers", [1, 3])
def test_escalations_are_limited_in_the_order_of_the_plan(workers):
    proofs = {key: reply for key, reply in GOOD.items() if key.startswith("prove")}
    said = {**GOOD, **{key: Completion(reply, door="escalate") for key, reply in proofs.items()}}
    above = Script({"prove L1": "nine", "prove L2": "sixteen", "prove FINAL": "\\boxed{30}"})
    solution, trail, _ = solve(PROBLEM, said, above=above, escalations=1, workers=workers)
    assert solution.verified
    assert [key for key, _ in above.calls] == ["prove L1"]
    assert whats(trail).count("escalate") == 1 and whats(trail).count("stay") == 2


def test_where_a_model_fails_the_larger_one_is_asked_or_the_run_ends():
    trail = Trail()
    solver = ALGSolver(ScriptedChat([PLAN]), SubprocessRunner(), desk=Desk(trail))
    with pytest.raises(ChatFailed):
        solver.solve(PROBLEM)
    assert trail.lines[-1].failed
    trail = Trail()
    larger = ScriptedChat(Script(GOOD), name="larger")
    solution = ALGSolver(ScriptedChat([PLAN]), SubprocessRunner(), above=larger, desk=Desk(trail)).solve(PROBLEM)
    assert solution.answer == "30"
    assert any(item.what == "escalate" and "gave no answer" in item.why for item in trail.decisions)


def test_earlier_graphs_are_gone_on_with_where_they_build_on_verified_lemmas():
    first, _, _ = solve(PROBLEM, {**GOOD, "code FINAL": FAILS}, repairs=0, restructures=0)
    graph = LemmaGraph.from_dict(json.loads(json.dumps(first.graph.to_dict())))
    said = {key: reply for key, reply in GOOD.items() if key.endswith("FINAL")}
    second, _, script = solve(PROBLEM, said, graph=graph)
    assert second.answer == "30"
    assert {key.split()[1] for key, _ in script.calls} == {"FINAL"}
    graph = LemmaGraph(
        (
            Lemma("L1", "The square of 3 is 9.", status="failed"),
            Lemma("L2", "The square of 4 is 16.", dependencies=("L1",), status="verified"),
            Lemma("FINAL", "The answer is 30.", dependencies=("L2",)),
        )
    )
    solution, _, script = solve(PROBLEM, GOOD, graph=graph)
    assert solution.verified and script.counts["prove L2"] == 1
    assert replace(solution.graph["L1"], proof="", why="").status == "verified"


@pytest.mark.parametrize("problem", ["", "  ", "x" * 9000])
def test_a_problem_that_is_empty_or_too_long_is_refused(problem):
    with pytest.raises(ValueError, match="1 to 8000 characters"):
        solve(problem, {})


def test_settings_survive_json():
    settings = LemmaSettings(repairs=1, workers=3, efforts={"check": "high"})
    assert settings.efforts.check == "high" and settings.efforts.plan == "medium"
    assert LemmaSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    "value",
    [
        {"repair": 1},
        {"repairs": -1},
        {"workers": 0},
        {"memory_mb": 16},
        {"temperature": float("nan")},
        {"code_timeout_s": 0},
        {"code_timeout_s": float("inf")},
        {"efforts": {"prove": "extreme"}},
        {"efforts": {"guess": "low"}},
    ],
)
def test_bad_settings_are_refused_by_name(value):
    with pytest.raises(ValueError, match=next(iter(value))):
        LemmaSettings.from_dict(value)
