"""The parts by themselves: bytes of tokens, jobs of one request."""

import asyncio
from contextlib import closing

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from sigma0.config import ExitConfig
from sigma0.ladder import FidelityLadder, Rung
from sigma0.serve.api.events import RunningChoices
from sigma0.serve.api.ladder import LadderRunner, LadderTask
from sigma0.serve.api.logprobs import LEAST, finite, token_text
from sigma0.serve.engine.messages import EngineRequest, RequestFailed, RequestOutput, TokenOutput
from sigma0.signals.savings import Savings

TOKEN = TokenOutput(5, "a", 1, "threshold_met", None, 0.0, 1.0, 0.0, None, (), "m")
DONE = RequestOutput("a", (TOKEN,), "stop", 1, 0, 6, 0, 0, Savings(None, None, None, None), None, "escalate", None)


def test_bytes_of_tokens_make_the_text(pocket):
    tokenizer = pocket[1]
    text = "Sara: naïve 🙂 <|im_end|>"
    output = [token_text(tokenizer, token) for token in tokenizer(text)["input_ids"]]
    assert bytes(byte for _, some in output for byte in some).decode() == text
    assert any("\ufffd" in piece for piece, _ in output)
    assert token_text(tokenizer, len(tokenizer) + 5) == ("", None)
    # of another kind
    words = Tokenizer(WordLevel({"naïve": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    assert token_text(tokenizer, 0) == ("naïve", list("naïve".encode()))


def test_logprobs_are_numbers_that_json_can_hold():
    assert [finite(item) for item in (-1.5, float("-inf"), float("nan"), None, -1e9)] == [-1.5, *[LEAST] * 4]


class Source:
    """Events as an engine's, of which errors are raised and `...` never comes, and how often it was closed."""

    def __init__(self, *events):
        self.events, self.closed = list(events), 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if not self.events:
            raise StopAsyncIteration
        event = self.events.pop(0)
        if event is Ellipsis:
            await asyncio.Event().wait()
        if isinstance(event, BaseException):
            raise event
        return event

    async def aclose(self):
        self.closed += 1


def running(*sources):
    over = []
    result = RunningChoices(20.0, lambda *_: None, lambda: over.append(True))
    for source in sources:
        result.add(source)
    return result, over


async def test_ends_come_in_the_order_of_the_jobs():
    other = RequestOutput(**{**vars(DONE), "text": "b"})
    result, over = running(Source(TOKEN, TOKEN, DONE), Source(other))
    assert [done.text for done in await result.all_done()] == ["a", "b"]
    await result.close()
    await result.close()
    assert over == [True]


async def test_closing_cancels_what_has_begun_and_what_has_not():
    first, last = Source(TOKEN, ...), Source(...)
    result, over = running(first, Source(...))
    assert await anext(result.events()) == (0, TOKEN)
    result.add(last)  # its task had no step yet
    await result.close()
    assert first.closed == 1 and last.closed == 1 and over == [True]


@pytest.mark.parametrize("source, kind", [(Source(TOKEN, KeyError("x")), KeyError), (Source(TOKEN), RequestFailed)])
async def test_failures_come_out_where_the_request_waits(source, kind):
    result, over = running(source)
    with pytest.raises(kind):
        await result.all_done()
    await result.close()
    assert source.closed == 1 and over == [True]


async def test_closing_goes_on_though_its_caller_is_cancelled():
    source = Source(TOKEN, ...)
    result, over = running(source)
    await asyncio.sleep(0)
    ending = asyncio.create_task(result.close())
    await asyncio.sleep(0)
    ending.cancel()
    while not over:
        await asyncio.sleep(0)
    assert source.closed == 1


async def test_closing_a_route_closes_the_engine_behind_it(pocket):
    task = LadderTask(EngineRequest((5,), 2, ExitConfig()), "Once upon", "answer")
    engine, after = Source(TOKEN, ...), Source(...)
    with closing(LadderRunner(FidelityLadder([Rung.local(*pocket, "pocket")]), 6)) as runner:
        result, _ = running(runner.route(engine, task, print))
        await asyncio.sleep(0.01)
        await result.close()
        assert engine.closed == 1
        fresh, _ = running()
        fresh.add(runner.route(after, task, print), after)
        await fresh.close()
        assert after.closed
