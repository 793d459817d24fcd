"""Strangers' grammars break processes of their own, and nothing else."""

import threading

import pytest

from sigma0.children import start_child
from sigma0.decode.grammar import bounds
from sigma0.decode.grammar import trial as trials
from sigma0.decode.grammar.spec import Choice, Grammar, JsonSchema, Regex
from tests.decode.grammar.matching import VOCABULARY, refused
from tests.decode.grammar.test_bounds import chained


@pytest.fixture(scope="module")
def trial():
    made = VOCABULARY.trial()
    yield made
    made.close()


def test_what_can_be_followed_is_told_with_its_shortest_answer(trial):
    assert trial.least(Regex("a{3}b*")) == 3
    assert trial.least(Choice(("ab", "abc"))) == 2
    with refused("regex cannot be followed: .*unclosed group"):
        trial.least(Regex("(a"))
    with refused("rules"):
        trial.least(Grammar(chained(5000)))


def serve_without_bounds(descriptor):
    bounds.RULES = bounds.TEXT = 10**9
    trials._serve(descriptor)


def test_a_chain_that_overflows_the_stack_ends_alone(monkeypatch):
    monkeypatch.setattr(trials, "start_child", lambda *_: start_child(__name__, "serve_without_bounds"))
    made = VOCABULARY.trial()
    with refused("more time or memory"):
        made.least(Grammar(chained(20_000)))
    assert made.least(Regex("ab")) == 2
    made.close()


def test_what_takes_too_long_is_refused_and_holds_up_nobody(trial):
    slow = JsonSchema.of({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}})
    outcomes, done = [], threading.Event()

    def hog():
        with refused("more time or memory"):
            trial.least(slow)
        outcomes.append("hog")
        done.set()

    thread = threading.Thread(target=hog)
    thread.start()
    assert trial.least(Regex("a{4}")) == 4
    outcomes.append("quick")
    assert done.wait(60)
    thread.join()
    assert outcomes == ["quick", "hog"]


@pytest.mark.slow
def test_a_process_that_was_lost_is_replaced():
    made = VOCABULARY.trial()
    assert made.least(Regex("a")) == 1
    made._control.shutdown(2)
    assert made.least(Regex("ab")) == 2
    # what is known is not tried again
    made.close()
    assert made.least(Regex("ab")) == 2 and made._control is None
    made.close()
