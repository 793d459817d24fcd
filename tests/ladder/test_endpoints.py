"""Drafts, answers and endpoints, against a real server process that hangs, fails, lies and breaks off."""

import copy
import json
import logging
import subprocess
import sys
import tracemalloc
import urllib.request
from pathlib import Path

import pytest

import sigma0
from sigma0.ladder import AllOf, Always, Budget, Entropy, FidelityLadder, Margin, Never, Rung, replay
from sigma0.ladder.endpoint import _whole
from tests.marks import slow

pytest.importorskip("openai")
SERVER = Path(__file__).with_name("misbehaving_server.py")
KEY = "sk-very-secret"
ANSWER = "Paris is the capital of France."
STORY = "Mary went to the park. The hat is with Mary. Where is the hat?"
QUESTION = [{"role": "user", "content": "Mary went to the park. Where is Mary?"}]

# a server of its own, and the client, which the first of them waits for
pytestmark = pytest.mark.cpu(8)


@pytest.fixture(scope="module")
def url():
    with subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        process.kill()


def requests_to(url, name):
    with urllib.request.urlopen(url) as reply:
        return json.load(reply).get(name, [])


# Seconds for endpoints that never end by themselves, or not before; all others have as long as a busy machine takes.
ENDLESS = {"hangs": 1.0, "dribbles": 0.6, "comments": 0.5, "slow-headers": 0.5, "stalls": 0.5, "stays-open": 2.0}


def ladder(pocket, url, names, policy=None, budget=None, **settings):
    settings = {"attempts": 2, "backoff": 0.01, **settings}
    ends = [Rung.endpoint(url, name, KEY, **{"timeout": ENDLESS.get(name, 60.0), **settings}) for name in names]
    return FidelityLadder([Rung.local(*pocket, "pocket"), *ends], policy=policy or Always(), budget=budget)


def answer(pocket, url, names, *arguments, new=20, **settings):
    return ladder(pocket, url, names, *arguments, **settings).generate(QUESTION, unit="answer", max_new_tokens=new)


def outcomes(generation):
    return [(decision.rung, decision.outcome) for decision in generation.trail.decisions]


def test_an_answer_goes_up_and_comes_back_and_with_never_the_small_one_answers_alone(pocket, url):
    result = answer(pocket, url, ["good"])
    assert result.drafts == (), "a whole answer is written in no drafts"
    assert result.text == ANSWER and result.rung == "good" and result.door == "abort" and result.top_rung
    assert outcomes(result) == [(0, "hand_up"), (1, "top_rung")] and replay(result.trail) == []
    assert result.spent.calls == 1 and (result.spent.large_tokens, result.spent.catch_up_tokens) == (7, 11)
    asked = requests_to(url, "good")[-1]
    assert asked["messages"] == QUESTION and asked["max_tokens"] == 20
    before = len(requests_to(url, "good"))
    result = answer(pocket, url, ["good"], Never())
    alone = sigma0.generate(*pocket, QUESTION, max_new_tokens=20)
    assert result.text == alone.text and result.verdict == alone.verdict and result.rung == "pocket"
    assert len(requests_to(url, "good")) == before
    small = result.costs[0]
    assert (small.passes, small.tokens) == (alone.loop_passes, len(alone.tokens))
    assert small.rows == alone.loop_rows + alone.prompt_rows


@pytest.mark.grid(fast=3, slow=4)
@pytest.mark.parametrize(
    "name, output",
    [
        ("deep", "garbage"),
        ("hangs", "timeout"),
        ("fails", "status 500"),
        ("garbage", "cut off"),
        ("nonsense", "garbage"),
        ("cut", "cut off"),
        slow("dribbles", "timeout"),
        ("long", "too long"),
        ("refuses", "refused"),
        ("breaks", "ended otherwise"),
        ("redirects", "status 307"),
        ("endless-line", "too long"),
        ("endless-event", "too long"),
        ("endless-comments", "too long"),
        ("endless-error", "too long"),
        ("endless-gzip", "too long"),
        ("other-packing", "garbage"),
    ],
)
def test_a_broken_endpoint_costs_one_rung_and_never_the_answer(pocket, url, name, output, caplog):
    caplog.set_level(logging.DEBUG)
    alone = sigma0.generate(*pocket, QUESTION, max_new_tokens=12).text
    broken = answer(pocket, url, [name], new=12)
    assert broken.text == alone and broken.rung == "pocket" and broken.door in ("converge", "escalate")
    assert outcomes(broken) == [(0, "hand_up"), (1, "error")]
    assert broken.trail.decisions[-1].why == output
    assert broken.costs[1].calls == (1 if name == "refuses" else 2)
    mended = answer(pocket, url, [name, "good"], new=12)
    assert mended.text == ANSWER and mended.rung == "good"
    assert outcomes(mended) == [(0, "hand_up"), (1, "error"), (2, "top_rung")]
    assert replay(mended.trail) == []
    # the key goes to the server and nowhere else
    shown = mended.trail.to_jsonl() + json.dumps(mended.to_dict()) + caplog.text + repr(broken)
    assert KEY not in shown and KEY not in repr(Rung.endpoint(url, name, KEY))


@pytest.mark.parametrize("name", ["redirects", "endless-line", "endless-gzip"])
def test_neither_requests_nor_bytes_go_beyond_what_was_allowed(pocket, url, name):
    """What two attempts take: requests that the server saw, or bytes of memory at the peak."""
    # whatever is loaded once is loaded before
    answer(pocket, url, ["good"], new=8)
    before = len(requests_to(url, name))
    tracemalloc.start()
    result = answer(pocket, url, [name], new=8, budget=Budget(calls=2), attempts=9)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.spent.calls == len(requests_to(url, name)) - before == 2
    assert peak < 2**23


@pytest.mark.parametrize(
    "name, written, read",
    [
        *[("zero-usage", 6, 8), ("thinks", 20, 8), ("gzip", 7, 11)],
        *[("true-usage", 20, None), ("infinite-usage", 20, None), slow("stays-open", 20, None)],
    ],
)
def test_a_whole_answer_is_taken_and_charged_by_its_usage_or_what_the_texts_show_if_that_is_more(
    pocket, url, name, written, read
):
    """The answer has six words, the question eight; what is no whole number is charged at the most that was allowed."""
    result = answer(pocket, url, [name])
    asked = result.trail.decisions[0].asked
    assert result.text == ANSWER
    assert (result.spent.large_tokens, result.spent.catch_up_tokens) == (written, read or asked.catch_up_tokens)


def test_drafts(pocket, url):
    """The first draft stays below, the second is written above; each continues what stands."""
    text = "The hat is with Mary. Mary went to the park. Tom has a cat. "
    policy = AllOf((Margin(1.0), Entropy(0.0)))
    result = ladder(pocket, url, ["echo"], policy).generate(text, unit="draft", max_new_tokens=12, draft_tokens=6)
    assert result.unit == "draft" and result.drafts[0][0] == "echo"
    assert requests_to(url, "echo")[-1]["messages"][-1]["content"] == text
    alone = ladder(pocket, url, ["echo"], Never()).generate(text, unit="draft", max_new_tokens=12, draft_tokens=6)
    whole = sigma0.generate(*pocket, text, max_new_tokens=12)
    assert alone.text == whole.text and {rung for rung, _ in alone.drafts} == {"pocket"}
    assert [decision.position for decision in alone.trail.decisions] == list(range(len(alone.drafts)))
    chat = ladder(pocket, url, ["echo"], Never()).generate(QUESTION, unit="draft", max_new_tokens=12, draft_tokens=3)
    assert chat.text == sigma0.generate(*pocket, QUESTION, max_new_tokens=12).text and len(chat.drafts) > 1


def test_the_switch_hands_answers_up(pocket, url, monkeypatch):
    above = FidelityLadder([Rung.local(*pocket, "pocket"), Rung.endpoint(url, "good", KEY)])
    unsure = [{"role": "user", "content": "Who is the president?"}]
    for switch in ("0", "1"):
        monkeypatch.setenv("SIGMA0_LADDER", switch)
        for question, shut in ((QUESTION, False), (unsure, True)):
            alone = sigma0.generate(*pocket, question, max_new_tokens=20)
            assert (alone.door != "converge") == shut, "choose another question"
            result = sigma0.generate(*pocket, question, max_new_tokens=20, ladder=above)
            rose = shut and switch == "1"
            assert result.tokens == alone.tokens and result.draft == (alone if rose else None)
            assert (result.above is not None) == rose == ("above" in result.to_dict()) == ("draft" in result.to_dict())
            # text, verdict and door are those of whoever had the last word
            last = result.above if rose else alone
            assert (result.text, result.verdict, result.door) == (last.text, last.verdict, last.door)
            assert result.text == result.answer == (ANSWER if rose else alone.text)
    output = result.to_dict()
    assert (output["text"], output["door"], output["draft"]["text"]) == (ANSWER, "abort", alone.text)
    assert output["draft"]["door"] == "escalate" and output["verdict"] == result.above.verdict.to_dict()
    assert result.above.costs[0].tokens == 0 and replay(result.above.trail) == []


def test_a_warm_start_keeps_to_the_budget_and_the_limit(pocket):
    large, tokenizer = sigma0.load("pocket-large", dtype="float32"), pocket[1]
    rungs = [Rung.local(*pocket, "pocket"), Rung.local(*large, "pocket-large")]
    # of its draft something comes before the least sure token, which a warm start begins with
    story = "The hat is with Mary. Mary went to the park. Where is the hat?"
    read = len(tokenizer(story)["input_ids"])
    settings = {"unit": "answer", "warm_start": True}
    ladder = FidelityLadder(rungs, Budget(catch_up_tokens=read), Always())
    result = ladder.generate(story, max_new_tokens=8, **settings)
    assert result.spent.catch_up_tokens <= read and result.door == "abort" and result.rung == "pocket"
    ladder = FidelityLadder(rungs, policy=Always())
    for new in (2, 3, 5, 12):
        warm = ladder.generate(story, max_new_tokens=new, **settings)
        assert len(tokenizer(warm.text, add_special_tokens=False)["input_ids"]) <= new
    cold = ladder.generate(story, "answer", max_new_tokens=12)
    assert warm.rung == cold.rung == "pocket-large" and warm.text.strip() == cold.text.strip() != ""
    assert warm.costs[1].tokens < cold.costs[1].tokens


def test_an_upper_rung_that_cannot_read_the_prompt_costs_itself(pocket, url):
    large, tokenizer = sigma0.load("pocket-large", dtype="float32")
    bare = copy.copy(tokenizer)
    bare.chat_template = None
    rungs = [Rung.local(*pocket, "pocket"), Rung.local(large, bare, "bare"), Rung.endpoint(url, "good", KEY)]
    result = FidelityLadder(rungs, policy=Always()).generate(QUESTION, unit="answer", max_new_tokens=12)
    assert outcomes(result) == [(0, "hand_up"), (1, "error"), (2, "top_rung")] and result.text == ANSWER


@pytest.mark.parametrize("name", ["comments", "slow-headers", "stalls"])
def test_time_is_kept_whatever_a_server_dribbles(pocket, url, name):
    result = answer(pocket, url, [name], new=12, attempts=1)
    # the server would go on for a minute, and then end in another way
    assert result.trail.decisions[-1].why == "timeout" and result.rung == "pocket"


def test_an_endpoint_that_is_cut_at_its_limit_says_so_and_halves_of_characters_are_replaced(pocket, url):
    assert answer(pocket, url, ["length"]).stop_reason == "length"
    drafts = ladder(pocket, url, ["length"]).generate("Hi.", unit="draft", max_new_tokens=12, draft_tokens=4)
    assert len(drafts.drafts) == 3
    assert _whole("a\ud83d\ude00b\ud800") == "a\U0001f600b\ufffd" and _whole("plain \u2028") == "plain \u2028"
