"""One request to an endpoint: what is made of its chunks, its failures and its time."""

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from sigma0.ladder.endpoint import BYTES_PER_TOKEN, EndpointClient, Reply, _Answer, _ending, _gather, _usage, _verdict
from sigma0.signals.verdict import ReasonVerdict
from tests.ladder.test_asker import MESSAGES, MOST, Scripted, answered

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")


def chunk(text=None, finish=None, index=0, usage=None, sigma0=None):
    choice = SimpleNamespace(index=index, delta=SimpleNamespace(content=text), finish_reason=finish)
    return SimpleNamespace(choices=[choice], usage=usage, sigma0=sigma0)


def usage(read, written):
    return SimpleNamespace(prompt_tokens=read, completion_tokens=written)


def gathered(*chunks, most=1):
    answer = _Answer()
    return _gather(iter(chunks), answer, most), answer


def test_pieces_of_the_first_choice_are_the_answer():
    bare = SimpleNamespace(choices=[SimpleNamespace(index=0, delta=None, finish_reason=None)])
    output, answer = gathered(
        chunk("é"), chunk("no", "length", index=1), chunk(3), bare, SimpleNamespace(choices=None, usage=usage(3, 4)),
        chunk("b", "stop"), chunk(usage=usage(5, "many")), chunk(),
    )  # fmt: skip
    assert output == "ok" and answer == _Answer(["é", "b"], 3, 0, "stop", (3, 4), None, {})
    assert _usage(usage(3, 4)) == (3, 4)
    assert {_usage(odd) for odd in (usage("3", 4), usage(True, 4), usage(3, 4.0), None, object())} == {None}
    assert gathered(chunk("a"))[0] == "cut off" and gathered()[0] == "cut off"
    assert gathered(chunk("a", "stop"), chunk("b", "length"))[1].finish_reason == "length"
    for odd in ("error", "content_filter", "tool_calls", 0, {}, {"stop": 1}, ["stop"], True):
        output, answer = gathered(chunk("a", odd), chunk("b", "stop"))
        assert (output, answer.finish_reason) == ("ended otherwise", None)


def test_an_answer_is_cut_off_where_no_tokens_are_so_long_and_the_last_event_tells_of_its_server():
    assert BYTES_PER_TOKEN == 16
    assert gathered(chunk("x" * 32, "stop"), most=2)[0] == "ok"
    output, answer = gathered(chunk("x" * 33), chunk("y", "stop"), most=2)
    assert output == "too long" and len(answer.parts) == 1
    assert gathered(chunk("é" * 16, "stop"), most=2)[0] == "ok"
    assert gathered(chunk("é" * 16), chunk("z", "stop"), most=2)[0] == "too long"
    good = {"verdict": 1, "door": "abort"}
    assert _ending({"choices": [good, {"verdict": 2}]}) == _ending({"choices": [good, 3]}) == good
    output, answer = gathered(chunk("a", "stop", sigma0={"choices": [good]}), chunk(), chunk(sigma0={"choices": 3}))
    assert output == "ok" and answer.sigma0 == good
    for odd in (None, 3, {}, {"choices": good}, {"choices": []}, {"choices": [3]}, {"choices": [{"door": "abort"}]}):
        assert _ending(odd) == {}


def test_verdict_door_and_passes_of_a_server():
    verdict = ReasonVerdict(
        converged=None, depth=1.0, proximity=0.0, grounded=None, stable=None, reason=None, confidence=0.5
    )
    event = {"verdict": verdict.to_dict(), "door": "escalate", "passes": 7}
    assert _verdict(event) == (verdict, "escalate", 7)
    assert _verdict({**event, "door": "ajar"}) == (verdict, None, 7)
    assert _verdict({**event, "verdict": {"depth": -1}}) == _verdict({}) == (None, None, None)
    assert [_verdict({**event, "passes": passes})[2] for passes in (0, 2**53)] == [0, 2**53]
    assert {_verdict({**event, "passes": odd})[2] for odd in (2**53 + 1, -1, True, 1.0, "1")} == {None}
    asker = Scripted([answered(**event)])
    assert asker.ask(MESSAGES, 10) == Reply("hi", "ok", None, MOST, False, verdict, "escalate", 7)


def client_of(*chunks, error=None, hangs=None):
    """Stands for the `openai` client: gives chunks, or fails."""

    def output():
        yield from chunks
        if hangs is not None:
            hangs.wait(60)
        if error is not None:
            raise error

    client, stream = Mock(), MagicMock()
    stream.__enter__.return_value, stream.__iter__.side_effect = stream, output
    client.chat.completions.create = Mock(return_value=stream, side_effect=None if chunks else error)
    return client


def attempted(client, left=None, **settings):
    asker, limits = Scripted([], **settings), []
    if left is not None:
        asker.purse = SimpleNamespace(seconds_left=left)
    asker._open = lambda limit, _: limits.append(limit) or client
    return EndpointClient._attempt(asker, MESSAGES, 10, {"temperature": 0.5}), limits


def test_a_request_asks_for_a_stream_with_its_usage():
    client = client_of(chunk("hi", "stop"), SimpleNamespace(choices=[], usage=usage(3, 4)))
    answer, limits = attempted(client, timeout=30.0)
    assert answer == _Answer(["hi"], 2, 0, "stop", (3, 4), "ok", {}) and client.close.called and limits == [30.0]
    client.chat.completions.create.assert_called_once_with(
        model="m", messages=MESSAGES, max_tokens=10, stream=True, stream_options={"include_usage": True},
        temperature=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("left, limit", [(5.0, 5.0), (50.0, 30.0), (-1.0, 0.001)])
def test_a_request_has_the_time_that_is_left(left, limit):
    assert attempted(client_of(chunk("hi", "stop")), left, timeout=30.0)[1] == [limit]


def failure(kind, status=None):
    request = httpx.Request("POST", "http://host/v1")
    if status is not None:
        return kind("key", response=httpx.Response(status, request=request), body=None)
    return kind(request=request)


class SlowTimeout(Exception):
    pass


@pytest.mark.parametrize(
    "error, parts, outcome",
    [
        (failure(openai.AuthenticationError, 401), [], "refused"),
        (failure(openai.PermissionDeniedError, 403), [], "refused"),
        (failure(openai.NotFoundError, 404), [], "refused"),
        (failure(openai.BadRequestError, 400), [], "refused"),
        (failure(openai.RateLimitError, 429), [], "status 429"),
        (failure(openai.APITimeoutError), [], "timeout"),
        (failure(openai.APIConnectionError), [], "no connection"),
        (failure(openai.APIConnectionError), [chunk("a")], "cut off"),
        (KeyError("x"), [chunk("a")], "garbage"),
        (KeyError("x"), [chunk("a", "stop")], "ok"),
        (SlowTimeout(), [chunk("a")], "timeout"),
        (SlowTimeout(), [chunk("a", "stop")], "ok"),
    ],
    ids=str,
)
def test_failures_are_told_by_their_kind(error, parts, outcome):
    answer, _ = attempted(client_of(*parts, error=error))
    assert answer.outcome == outcome and answer.parts == ["a"] * len(parts)


@pytest.mark.parametrize("finish, outcome", [(None, "timeout"), ("stop", "ok")])
def test_a_request_is_given_up_when_its_time_is_over(finish, outcome):
    hangs = threading.Event()
    client = client_of(chunk("a", finish), hangs=hangs)
    answer, _ = attempted(client, timeout=0.2)
    hangs.set()
    assert (answer.outcome, answer.parts, client.close.called) == (outcome, ["a"], True)


def test_a_client_has_the_address_and_no_attempts_of_its_own_and_may_not_come_to_be():
    for error in (OSError(), RuntimeError(), ValueError()):
        asker = Scripted([])
        asker._open = Mock(side_effect=error)
        assert EndpointClient._attempt(asker, MESSAGES, 10, {}).outcome == "no client"
    client = EndpointClient._open(Scripted([]), 7.0, 10)
    assert (str(client.base_url), client.api_key, client.max_retries) == ("http://host/v1/", "none", 0)
    assert client.timeout == 7.0
    client.close()
