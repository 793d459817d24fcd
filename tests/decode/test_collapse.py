"""What becomes of a text that runs in circles: ended, tightened, or left alone."""

import dataclasses
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sigma0
from sigma0 import ExitConfig
from sigma0.decode.repetition import CollapseStop
from sigma0.signals.canary import Adaptation, Tighten
from tests.decode.captures import called_by
from tests.marks import exhaustive, slow
from tests.test_cli import run

CIRCLES = "..."
ORDINARY = "Mary went to the park. The hat is with Mary. Where is the hat?"
CONFIGS = [
    ExitConfig(mode="margin", theta=0.9),
    slow(ExitConfig(q=0.3)),
    exhaustive(ExitConfig(mode="full")),
    ExitConfig(q=0.3, after_exit="verify"),
    exhaustive(ExitConfig(q=0.3, after_exit="verify", redraft=False)),
    slow(ExitConfig(q=0.3, after_exit="drop")),
]


# under which the text above runs in circles within its limit
CIRCLING = ExitConfig(q=0.6)


def written(pocket, prompt, how, tokens=64, **settings):
    settings = {"exit_config": CIRCLING, **settings}
    return sigma0.generate(*pocket, prompt, max_new_tokens=tokens, on_collapse=how, **settings)


def test_a_text_that_runs_in_circles_is_ended_by_default(pocket):
    out = sigma0.generate(*pocket, CIRCLES, exit_config=CIRCLING)
    assert out.stop_reason == "collapse" and len(out.tokens) < 64
    assert out.verdict.reason == "collapse" and out.verdict.converged is False and out.door == "escalate"
    assert written(pocket, CIRCLES, "ignore").stop_reason == "length"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda item: f"{item.mode}-{item.after_exit}-{item.redraft}")
def test_what_is_written_until_then_is_what_it_would_write(pocket, config):
    ended = 0
    for prompt in (CIRCLES, "The", "a b a b", ORDINARY):
        stopped, ignored = (written(pocket, prompt, how, 120, exit_config=config) for how in ("stop", "ignore"))
        ids = [token.id for token in stopped.tokens]
        assert ids == [token.id for token in ignored.tokens][: len(ids)] and ignored.text.startswith(stopped.text)
        assert [token.depth for token in stopped.tokens[:-1]] == [token.depth for token in ignored.tokens][
            : len(ids) - 1
        ]
        assert (len(ids) < len(ignored.tokens)) == (stopped.stop_reason == "collapse")
        assert ignored.stop_reason != "collapse"
        ended += stopped.stop_reason == "collapse"
    assert ended >= 1


def test_it_is_ended_without_a_verdict_too(pocket):
    out = written(pocket, CIRCLES, "stop", verdict=False)
    assert out.stop_reason == "collapse" and out.verdict is None
    assert [token.id for token in out.tokens] == [token.id for token in written(pocket, CIRCLES, "stop").tokens]


def test_a_stream_that_was_ended_leaves_nothing_under_way(pocket):
    tokens = sigma0.stream(*pocket, CIRCLES, exit_config=ExitConfig(q=0.3, after_exit="verify"))
    reported = [token.id for token in tokens]
    assert tokens.generation.stop_reason == "collapse" and tokens.generation.tokens[-1].id == reported[-1]
    assert next(tokens, None) is None


@pytest.mark.parametrize(
    ("after_exit", "way"), [("finish", "eager"), ("verify", "eager"), slow("finish", "late"), slow("verify", "late")]
)
def test_in_a_batch_it_alone_is_ended(pocket, after_exit, way):
    """Also where the host sees each step one step late."""
    model, tokenizer = pocket
    texts = [CIRCLES, ORDINARY, "The"]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    with called_by(way, model) as (asked, _):
        loop, first = model.generate(
            **batch, max_new_tokens=100, do_sample=False, custom_generate=type(model).open_token_loop,
            exit_config=ExitConfig(q=0.3, after_exit=after_exit), **asked,
        )  # fmt: skip
        loop.collapse = CollapseStop()
        reported = [[] for _ in texts]
        for emissions in loop.run(first):
            for item in emissions:
                reported[item.sequence].append(item.token_id)
    alone = [written(pocket, text, "stop", 100, exit_config=ExitConfig(q=0.3, after_exit=after_exit)) for text in texts]
    assert reported == [[token.id for token in item.tokens] for item in alone]
    assert loop.collapsed == {place for place, item in enumerate(alone) if item.stop_reason == "collapse"}
    assert loop.collapsed and len(loop.collapsed) < len(texts)


def test_tighten_writes_on_and_repeats_itself_less(pocket):
    tightened, ignored = (written(pocket, CIRCLES, how, 100) for how in ("tighten", "ignore"))
    assert tightened.stop_reason == "length"
    grams = [
        len({tuple(ids[place : place + 4]) for place in range(len(ids) - 3)})
        for ids in ([token.id for token in item.tokens] for item in (tightened, ignored))
    ]
    assert grams[0] > 1.5 * grams[1]


def test_tighten_leaves_ordinary_texts_alone(pocket):
    texts = [written(pocket, ORDINARY, how).text for how in ("tighten", "ignore", "stop")]
    assert texts[0] == texts[1] == texts[2]


def test_tighten_may_be_asked_twice_about_a_token(pocket):
    """Under `verify` every proposal is judged by the processed scores: so it is full depth's text, tightened."""
    verified = written(pocket, CIRCLES, "tighten", 80, exit_config=ExitConfig(q=0.3, after_exit="verify"))
    full = written(pocket, CIRCLES, "tighten", 80, exit_config=ExitConfig(mode="full"))
    assert (
        verified.text == full.text != written(pocket, CIRCLES, "ignore", 80, exit_config=ExitConfig(mode="full")).text
    )


def test_tighten_acts_within_bounds_and_on_the_new_ids_alone():
    bounds = Adaptation()
    processor, prompt = Tighten(5, bounds), [7] * 5
    scores = torch.linspace(0.1, 3, 30)[None]
    calm = torch.tensor([prompt + list(range(8, 28))])
    assert processor(calm, scores) is scores
    circling = torch.tensor([prompt + [1, 2, 3] * 40])
    changed = processor(circling, scores.clone())
    least = scores / bounds.penalty / bounds.temperature
    assert bool((changed >= least - 1e-6).all()) and bool((changed <= scores).all())
    assert float(changed[0, 2] / scores[0, 2]) < 0.55 < float(changed[0, 9] / scores[0, 9]) < 0.7
    assert torch.equal(changed, processor(circling, scores.clone()))


def test_other_processors_stay(pocket):
    seen = []

    def watch(ids, scores):
        seen.append(ids.shape[1])
        return scores

    sigma0.generate(*pocket, ORDINARY, max_new_tokens=4, on_collapse="tighten", logits_processor=[watch])
    assert seen


@pytest.mark.parametrize("bad", ["halt", "", None, "Stop"])
def test_anything_else_is_refused(pocket, bad):
    with pytest.raises(ValueError, match="stop, tighten or ignore"):
        written(pocket, ORDINARY, bad)


def test_the_command_tells_it():
    command = ["generate", CIRCLES, "--exit", "qexit", "--q", "0.6"]
    out = run(*command)
    assert out.exit_code == 0 and "ended by collapse" in out.output
    ignored = run(*command, "--on-collapse", "ignore", "--json")
    assert json.loads(ignored.stdout)["stop_reason"] == "length"


class _Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["pocket", "pocket-large"])
def test_a_verdict_and_a_look_for_circles_take_few_operations_more(name):
    """What they cost on a CPU is the number of small operations, which unlike time is the same in every run."""
    model, tokenizer = sigma0.load(name, device="cpu", dtype="float32")
    calls = []
    for settings in ({"verdict": False, "on_collapse": "ignore"}, {"verdict": True, "on_collapse": "stop"}):
        with _Counting() as counting:
            out = sigma0.generate(model, tokenizer, ORDINARY, max_new_tokens=32, eos_token_id=[], **settings)
        assert len(out.tokens) == 32
        calls.append(counting.calls)
    assert calls[1] - calls[0] <= 16 * len(out.tokens), calls


@pytest.mark.parametrize("config", CONFIGS, ids=lambda item: f"{item.mode}-{item.after_exit}-{item.redraft}")
def test_a_streamed_token_tells_what_was_known_when_it_came(pocket, config):
    """Looked at as it comes, or once all have come: the same, though its loops have run on since."""
    settings = {"max_new_tokens": 8, "exit_config": config, "eos_token_id": [], "verdict": True}
    at_once = []
    for token in sigma0.stream(*pocket, ORDINARY, **settings):
        assert token.proximity is not None
        at_once.append(token)
    late = list(sigma0.stream(*pocket, ORDINARY, **settings))
    for early, token in zip(at_once, late, strict=True):
        assert token.verdict == early.verdict and (token.id, token.depth) == (early.id, early.depth)
        assert token.radius == pytest.approx(early.radius, rel=1e-4, abs=1e-5)
        assert token.entropy == pytest.approx(early.entropy, rel=1e-4, abs=1e-5)
        assert type(token) is type(early) is sigma0.Token
    with pytest.raises(dataclasses.FrozenInstanceError):
        late[0].radius = 1.0
