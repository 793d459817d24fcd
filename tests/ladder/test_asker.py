"""Requests to an endpoint, answered by hand: how often it is asked, and what is paid for each."""

from types import SimpleNamespace

import pytest

from sigma0.ladder import Budget, Price, Rung, Spending
from sigma0.ladder import endpoint as endpoints
from sigma0.ladder.answer_unit import Writer
from sigma0.ladder.budget import BudgetTracker, RungCost
from sigma0.ladder.endpoint import EndpointClient, Reply, _Answer, as_messages
from sigma0.ladder.trail import Trail
from sigma0.signals.verdict import DoorPolicy

MESSAGES = [{"role": "user", "content": "é?"}, {"role": "assistant"}]
# three bytes, and 64 for each message
READ = 3 + 2 * 64
MOST = Spending(large_tokens=10, catch_up_tokens=READ, calls=1, money=1.0 + 0.5 * READ + 2.0 * 10)


def answered(text="hi", outcome="ok", finish="stop", tokens=(4, 2), **more):
    return _Answer([text], len(text), 0, finish, tokens, outcome, more)


class Scripted(EndpointClient):
    """Gets these answers in turn."""

    def __init__(self, answers, budget=None, **settings):
        price = Price(prompt_token=0.5, new_token=2.0, call=1.0)
        rung = Rung.endpoint("http://host/v1", "m", name="far", **{"attempts": 3, "price": price, **settings})
        super().__init__(rung, BudgetTracker(budget or Budget()), RungCost("far"))
        self.answers, self.options, self.pauses = list(answers), [], []

    def _attempt(self, messages, max_new_tokens, options):
        self.options.append((messages, max_new_tokens, options))
        return self.answers.pop(0)

    def _wait(self, attempt):
        self.pauses.append(attempt)
        return True


def test_an_answer_is_paid_by_what_the_endpoint_says_it_took():
    asker = Scripted([answered()])
    assert asker.ask(MESSAGES, 10) == Reply("hi", "ok", None, MOST, False, None, None, None)
    cost = Spending(large_tokens=2, catch_up_tokens=4, calls=1, money=1.0 + 2.0 + 4.0)
    assert asker.purse.spent == cost and asker.pauses == []
    assert Reply(None, "refused", None, MOST).cut is False
    ((paid, seconds, outcome),) = asker.spent
    assert (paid, outcome) == (cost, "ok") and 0 <= seconds < 60
    assert (asker.cost.calls, asker.cost.read, asker.cost.tokens, asker.cost.money) == (1, 4, 2, 7.0)
    assert asker.cost.seconds == seconds and asker.purse.longest == {"ask far": 0.0}
    assert asker.options == [(MESSAGES, 10, {"temperature": 0})]


def test_options_of_a_request_win_and_a_prompt_is_what_the_user_says():
    asker = Scripted([answered(), answered()])
    asker.ask(MESSAGES, 10, {"temperature": 0.5, "stop": ["x"]})
    asker.ask(MESSAGES, 10, {"seed": 3})
    assert [item[2] for item in asker.options] == [{"temperature": 0.5, "stop": ["x"]}, {"temperature": 0, "seed": 3}]
    assert as_messages("hi") == [{"role": "user", "content": "hi"}]
    output = as_messages(MESSAGES)
    assert output == MESSAGES and output[0] is not MESSAGES[0]


@pytest.mark.parametrize(
    "tokens, paid",
    [
        (None, (READ, 10)), ((0, 0), (1, 1)), ((READ, 10), (READ, 10)), ((READ + 1, 10), (READ, 10)),
        ((READ, 11), (READ, 10)), ((-1, 5), (READ, 10)), ((5, -1), (READ, 10)),
    ],
)  # fmt: skip
def test_usage_that_cannot_be_is_not_believed(tokens, paid):
    asker = Scripted([answered(tokens=tokens)])
    asker.ask(MESSAGES, 10)
    assert (asker.cost.read, asker.cost.tokens) == paid
    assert asker.cost.money == 1.0 + 0.5 * paid[0] + 2.0 * paid[1]


def test_failed_requests_are_sent_again_refused_ones_are_not_and_budgets_end_them():
    asker = Scripted([answered(outcome="timeout"), answered(outcome=None), answered("there", finish="length")])
    assert asker.ask(MESSAGES, 10) == Reply("there", "ok", None, MOST, True)
    assert [outcome for *_, outcome in asker.spent] == ["timeout", "cut off", "ok"]
    assert asker.pauses == [1, 2] and asker.purse.spent.calls == asker.cost.calls == 3
    asker = Scripted([answered(outcome="status 500")] * 3)
    assert asker.ask(MESSAGES, 10) == Reply(None, "status 500", None, MOST)
    assert asker.purse.spent.calls == 3
    asker = Scripted([answered(outcome="refused")])
    assert asker.ask(MESSAGES, 10) == Reply(None, "refused", None, MOST) and asker.pauses == []
    asker = Scripted([answered(outcome="timeout")], Budget(calls=1))
    assert asker.ask(MESSAGES, 10) == Reply(None, "timeout", "calls", MOST)
    assert Scripted([], Budget(calls=0)).ask(MESSAGES, 10) == Reply(None, "not asked", "calls", MOST)
    assert Scripted([], Budget(catch_up_tokens=READ - 1)).ask(MESSAGES, 10).lacking == "catch_up_tokens"
    assert Scripted([], Budget(money=MOST.money - 0.5)).ask(MESSAGES, 10).lacking == "money"
    assert Scripted([answered()], Budget(money=MOST.money, large_tokens=10)).ask(MESSAGES, 10).text == "hi"
    asker = Scripted([answered(outcome="timeout")], Budget(seconds=100.0))
    asker._wait = lambda attempt: False
    assert asker.ask(MESSAGES, 10) == Reply(None, "timeout", "seconds", MOST)


def test_pauses_double_and_vary(monkeypatch):
    slept = []
    monkeypatch.setattr(endpoints.time, "sleep", slept.append)
    monkeypatch.setattr(endpoints.random, "uniform", lambda low, high: {(0.5, 1.0): 0.75}[low, high])
    asker = Scripted([], backoff=8.0)
    assert all(EndpointClient._wait(asker, attempt) for attempt in (1, 2, 3)) and slept == [6.0, 12.0, 24.0]
    asker.purse = BudgetTracker(Budget(seconds=13.0))
    assert EndpointClient._wait(asker, 2) and not EndpointClient._wait(asker, 3)
    asker.purse.refused.clear()
    # a pause that takes all that is left leaves nothing to ask in
    asker.purse = SimpleNamespace(seconds_left=6.0, refused=asker.purse.refused)
    assert not EndpointClient._wait(asker, 1)
    assert len(slept) == 4 and asker.purse.refused == {"seconds"}


@pytest.mark.parametrize(
    "stop, text, ended",
    [
        ((), "one two three", "eos"), (("two",), "one ", "stop"), (("three", "two"), "one ", "stop"),
        (("one",), "", "stop"), (("four",), "one two three", "eos"),
    ],
)  # fmt: skip
def test_an_answer_of_an_endpoint_ends_before_a_stop_string(stop, text, ended):
    for finish in ("stop", "length"):
        asker = Scripted([answered("one two three", finish=finish)])
        writer = Writer([asker.rung], DoorPolicy(), None, stop, asker.purse, Trail(), ())
        writer._clients[0] = asker
        attempt, output = writer.write(0, "count", 10)
        assert (attempt.text, output) == (text, "ok")
        assert attempt.stop_reason == ("length" if (ended, finish) == ("eos", "length") else ended)
        assert attempt.entropy is attempt.margin is attempt.verdict.confidence is None
        (line,) = writer.trail.lines
        assert (line.rung, line.step, line.told, line.cost) == (0, "ask far", "ok", writer.purse.spent)
        assert asker.spent == [] and asker.options[0][0] == [{"role": "user", "content": "count"}]


def test_a_failure_of_an_endpoint_is_told_with_what_was_lacking():
    asker = Scripted([answered(outcome="timeout"), answered(outcome="timeout")], Budget(calls=2))
    writer = Writer([asker.rung], DoorPolicy(), None, (), asker.purse, Trail(), ())
    writer._clients[0] = asker
    assert writer.forecast(0, MESSAGES, 10) == MOST
    assert writer.write(0, "count", 10) == (None, "timeout, then no calls left")
    assert [line.told for line in writer.trail.lines] == ["timeout", "timeout"]
    asker.answers = [answered(outcome="refused")]
    asker.purse = BudgetTracker(Budget())
    assert writer.write(0, "count", 10) == (None, "refused")
