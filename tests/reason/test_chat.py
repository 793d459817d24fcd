"""Chat models over real parts: the shipped models, a model without loops, a ladder, and this package's own server."""

import copy

import pytest
import torch

import sigma0
from sigma0.config import exit_for
from sigma0.ladder import Always, Budget, FidelityLadder, Never, Rung
from sigma0.reason.chat import (
    ChatFailed,
    ChatModel,
    Chooser,
    EndpointChat,
    LadderChat,
    LocalChat,
    ScriptedChat,
    label_ways,
)
from sigma0.reason.held import GrammarProcessor
from sigma0.reason.messages import ChatSettings
from tests.reference import tiny_llama
from tests.serve.conftest import served

STORY = "Mary went to the park. The hat is with Mary. Where is the hat?"
ASKED = [{"role": "user", "content": STORY}]
BINARY = [{"role": "user", "content": "Mary went to the park. The hat is with Mary. Is the hat in the barn?"}]


@pytest.fixture(scope="module")
def local(pocket):
    return LocalChat(*pocket, "pocket")


@pytest.fixture(scope="module")
def plain(pocket):
    """A random model without loops."""
    return tiny_llama(6, len(pocket[1]), eos_token_id=2, bos_token_id=1, max_position_embeddings=256)


def rungs(pocket):
    return [Rung.local(*pocket, "small"), Rung.local(*sigma0.load("pocket-large", dtype="float32"), "large")]


def test_every_kind_is_a_chat_model_and_a_looped_one_answers_with_its_verdict(local, pocket):
    ladder = LadderChat(FidelityLadder(rungs(pocket)))
    for model in (local, ScriptedChat([]), ladder, EndpointChat("http://127.0.0.1:9/v1", "x")):
        assert isinstance(model, ChatModel) and isinstance(model, Chooser) == (model is local)
    result = local.complete(ASKED, ChatSettings(effort="medium", max_tokens=20))
    alone = sigma0.generate(*pocket, ASKED, max_new_tokens=20)
    assert (result.text, result.verdict, result.door) == (alone.text, alone.verdict, alone.door)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (alone.prompt_tokens, len(alone.tokens))
    assert result.usage.loop_passes == alone.loop_passes and result.finish_reason == "stop"
    assert local.complete(ASKED, ChatSettings(max_tokens=2)).finish_reason == "length"


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high"])
def test_effort_is_depth(local, pocket, effort):
    model, _ = pocket
    config = exit_for(effort, model.resolve_exit_config(None), model.num_loops)
    expected = sigma0.generate(*pocket, ASKED, exit_config=config, max_new_tokens=20)
    result = local.complete(ASKED, ChatSettings(effort=effort, max_tokens=20))
    assert (result.text, result.verdict) == (expected.text, expected.verdict)


def test_seeds_tell_samples_apart_and_a_stop_string_is_no_part_of_the_text(local, plain, pocket):
    settings = {"temperature": 3.0, "max_tokens": 12}
    first, same, other = (local.complete(ASKED, ChatSettings(seed=seed, **settings)).text for seed in (1, 1, 2))
    assert first == same != other
    whole = local.complete(ASKED).text
    result = local.complete(ASKED, ChatSettings(stop=(" in",)))
    assert result.text == whole.split(" in")[0] and result.finish_reason == "stop"
    random = LocalChat(plain, pocket[1], "plain")
    whole = random.complete(ASKED, ChatSettings(max_tokens=12)).text
    stop = whole[len(whole) // 2 :][:2]
    assert random.complete(ASKED, ChatSettings(max_tokens=12, stop=(stop,))).text == whole.split(stop)[0]


@pytest.mark.parametrize("effort", ["low", "high"])
def test_labels_are_all_that_can_be_written(local, effort):
    label, result = local.choose(BINARY, ("Yes", "No"), effort=effort)
    assert label == "No" and result.text.strip() == "No"
    # a question that it would never answer so
    assert local.choose(ASKED, ("cellar", "attic, barn"), effort=effort)[0] in ("cellar", "attic, barn")


@pytest.mark.slow
def test_a_model_without_loops_answers_and_is_held_to_labels(plain, pocket):
    chat = LocalChat(plain, pocket[1], "plain")
    result = chat.complete(ASKED, ChatSettings(max_tokens=9))
    ids = pocket[1].apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = plain.generate(**ids, max_new_tokens=9, do_sample=False)
    new = out[0, ids["input_ids"].shape[1] :]
    assert result.text == pocket[1].decode(new, skip_special_tokens=True) and result.verdict is None
    assert result.usage.completion_tokens == len(new) and result.door is None
    assert chat.choose(BINARY, ("Yes", "No"))[0] in ("Yes", "No")
    sampled = [chat.complete(ASKED, ChatSettings(max_tokens=9, temperature=1.0, seed=seed)).text for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    silent = copy.deepcopy(pocket[1])
    silent.chat_template = None
    with pytest.raises(ValueError, match="'plain' has no chat template"):
        LocalChat(plain, silent, "plain")
    with pytest.raises(ValueError, match="no loops"):
        LocalChat(plain, pocket[1], "plain", {"mode": "full"})
    left, long = 256 - ids["input_ids"].shape[1], [{"role": "user", "content": "Mary " * 300}]
    ladder = LadderChat(FidelityLadder([Rung.local(plain, pocket[1], "plain")]))
    for item in (chat, ladder):
        # an answer has what the question leaves
        fitted = item.complete(ASKED, ChatSettings(max_tokens=400))
        assert fitted.text == item.complete(ASKED, ChatSettings(max_tokens=left)).text
        assert fitted.usage.completion_tokens <= left
        with pytest.raises(ChatFailed, match=r"plain cannot hold the question: .* context of 256"):
            item.complete(long, ChatSettings(max_tokens=1))
    nearly = [{"role": "user", "content": "Mary " * (left - 2)}]
    with pytest.raises(ChatFailed, match=r"context of 256"):
        chat.choose(nearly, ("Yes", "No no no no no no no no no"))


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_a_ladder_answers_for_its_rungs(pocket, effort):
    small, large = rungs(pocket)
    for policy, rung in ((Never(), small), (Always(), large)):
        chat = LadderChat(FidelityLadder([small, large], policy=policy), "token")
        result = chat.complete(ASKED, ChatSettings(effort=effort, max_tokens=20))
        current = small.model.resolve_exit_config(None)
        config = exit_for(effort, current, large.model.num_loops)
        text = LocalChat(rung.model, rung.tokenizer, "alone", {"mode": "full"} if effort == "high" else config)
        assert result.text == text.complete(ASKED, ChatSettings(effort="medium", max_tokens=20)).text
        assert result.usage.bytes_read > 0 and result.notes["rung"] == rung.name and result.verdict is not None
    assert chat.name == "small,large"


def test_a_ladders_rungs_have_the_effort_over_their_own_settings(pocket):
    small = rungs(pocket)[0]
    model = copy.deepcopy(pocket[0])
    model.generation_config.exit_config = {"mode": "fixed", "depth": 4}
    above = Rung.local(model, pocket[1], "above")
    for effort, depth in (("minimal", 2), ("medium", 4), ("high", 6)):
        runs = []
        for level, setting in ((effort, None), ("medium", {"mode": "fixed", "depth": depth})):
            rung = above if setting is None else Rung.local(model, pocket[1], "above", setting)
            chat = LadderChat(FidelityLadder([small, rung], policy=Always()), "token")
            answer = chat.complete(ASKED, ChatSettings(level, 20))
            runs.append((answer.text, answer.notes["costs"][1]["rows"]))
        assert runs[0] == runs[1]


def test_a_ladder_of_whole_answers_is_greedy_and_says_so(pocket):
    small, large = rungs(pocket)
    chat = LadderChat(FidelityLadder([small, large]))
    assert chat.complete(ASKED, ChatSettings(max_tokens=20)).text.strip() == "The hat is in the park."
    with pytest.raises(ValueError, match=r"temperature 0\.5 needs unit='token'"):
        chat.complete(ASKED, ChatSettings(temperature=0.5))
    broke = LadderChat(FidelityLadder([small, large], Budget(loop_passes=1)))
    with pytest.raises(ChatFailed, match="budget"):
        broke.complete(ASKED)


def test_an_endpoint_of_our_own_tells_its_verdict(pocket, local):
    with served(pocket) as server:
        chat = EndpointChat(f"{server.url}/v1", "pocket")
        result = chat.complete(ASKED, ChatSettings(effort="low", max_tokens=20))
        expected = local.complete(ASKED, ChatSettings(effort="low", max_tokens=20))
        # the engine runs other batches, which round otherwise
        nearly = expected.verdict.model_copy(update={"confidence": pytest.approx(expected.verdict.confidence)})
        assert (result.text, result.verdict, result.door) == (expected.text.strip(), nearly, expected.door)
        assert result.usage.prompt_tokens == expected.usage.prompt_tokens
        assert result.usage.completion_tokens == expected.usage.completion_tokens
        assert result.usage.loop_passes > 0 and result.notes == {"requests": 1}
        job = server.service.tickets[-1].request
        assert job.exit_config == exit_for("low", pocket[0].resolve_exit_config(None), 6)
        chat.complete(ASKED, ChatSettings(temperature=0.5, seed=7, stop=("barn",), max_tokens=4))
        job = server.service.tickets[-1].request
        assert (job.sampling.temperature, job.sampling.seed, job.stop) == (0.5, 7, ("barn",))
        silent = EndpointChat(f"{server.url}/v1", "pocket", send_effort=False)
        silent.complete(ASKED, ChatSettings(effort="low", max_tokens=4))
        assert server.service.tickets[-1].request.exit_config == pocket[0].resolve_exit_config(None)
        with pytest.raises(ChatFailed, match="refused"):
            EndpointChat(f"{server.url}/v1", "no-such-model").complete(ASKED)


def test_labels_that_make_no_sense_and_endpoints_that_are_not_there_are_refused(pocket):
    for labels in (("Yes",), ("Yes", "Yes"), ("Yes", ""), ("Yes", " No"), ("Yes", "<|im_end|>")):
        with pytest.raises(ValueError, match="label"):
            label_ways(pocket[1], labels)
    with pytest.raises(ChatFailed, match=r"x at http://127.0.0.1:9/v1 gave no answer: no connection"):
        EndpointChat("http://127.0.0.1:9/v1", "x", attempts=1).complete(ASKED)
    with pytest.raises(ValueError, match="base_url"):
        EndpointChat("ftp://somewhere", "x")


GRAMMAR = 'start: "The hat is in the " PLACE "."\nPLACE: "park" | "barn"'


@pytest.mark.slow
def test_a_random_model_writes_what_its_grammar_allows_and_ends(plain, pocket):
    pytest.importorskip("llguidance")
    chat = LocalChat(plain, pocket[1], "plain")
    texts = {
        chat.complete(ASKED, ChatSettings(max_tokens=40, temperature=1.0, seed=seed, grammar=GRAMMAR)).text
        for seed in range(12)
    }
    assert texts == {"The hat is in the park.", "The hat is in the barn."}
    done = chat.complete(ASKED, ChatSettings(max_tokens=40, grammar=GRAMMAR))
    assert done.finish_reason == "stop" and done.text in texts


def test_a_looped_model_is_held_too(pocket):
    written = LocalChat(*pocket, "pocket").complete(ASKED, ChatSettings(max_tokens=40, grammar=GRAMMAR))
    assert written.text in ("The hat is in the park.", "The hat is in the barn.")


@pytest.mark.slow
def test_bad_grammars_batches_and_ladders_are_refused(plain, pocket):
    pytest.importorskip("llguidance")
    chat = LocalChat(plain, pocket[1], "plain")
    with pytest.raises(ValueError, match="grammar cannot be followed"):
        chat.complete(ASKED, ChatSettings(grammar="start: ("))
    held = GrammarProcessor.of(GRAMMAR, plain, pocket[1], 1)
    with pytest.raises(ValueError, match="holds one sequence here, got 2"):
        held(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, len(pocket[1])))
    ladder = LadderChat(FidelityLadder(rungs(pocket)))
    with pytest.raises(ValueError, match="is a ladder, which cannot be held"):
        ladder.complete(ASKED, ChatSettings(grammar=GRAMMAR))
