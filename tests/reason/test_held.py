"""Models with and without loops held to a grammar, and who cannot be."""

import pytest
import torch

from sigma0.bench.pocket.tokenizer import build_tokenizer
from sigma0.ladder import Budget, FidelityLadder, Rung
from sigma0.reason.chat import LadderChat, LocalChat
from sigma0.reason.held import GrammarProcessor
from sigma0.reason.messages import ChatSettings
from tests.reference import tiny_llama

GRAMMAR = 'start: "The hat is in the " PLACE "."\nPLACE: "park" | "barn"'
USER = [{"role": "user", "content": "Mary went to the park. Where is Mary?"}]


@pytest.fixture(scope="module")
def plain():
    pytest.importorskip("llguidance")
    tokenizer = build_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return tiny_llama(0, len(tokenizer), intermediate_size=32, num_hidden_layers=1, **ids), tokenizer


@pytest.mark.slow
def test_a_random_model_writes_what_its_grammar_allows_and_ends(plain):
    chat = LocalChat(*plain, "plain")
    texts = {
        chat.complete(USER, ChatSettings(max_tokens=40, temperature=1.0, seed=seed, grammar=GRAMMAR)).text
        for seed in range(12)
    }
    assert texts == {"The hat is in the park.", "The hat is in the barn."}
    done = chat.complete(USER, ChatSettings(max_tokens=40, grammar=GRAMMAR))
    assert done.finish_reason == "stop" and done.text in texts


def test_a_looped_model_is_held_too(pocket):
    written = LocalChat(*pocket, "pocket").complete(USER, ChatSettings(max_tokens=40, grammar=GRAMMAR))
    assert written.text in ("The hat is in the park.", "The hat is in the barn.")


@pytest.mark.slow
def test_bad_grammars_batches_and_ladders_are_refused(plain, pocket):
    chat = LocalChat(*plain, "plain")
    with pytest.raises(ValueError, match="grammar cannot be followed"):
        chat.complete(USER, ChatSettings(grammar="start: ("))
    held = GrammarProcessor.of(GRAMMAR, *plain, 1)
    with pytest.raises(ValueError, match="holds one sequence here, got 2"):
        held(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, len(plain[1])))
    rungs = [Rung.local(*pocket, "a"), Rung.local(*pocket, "b")]
    ladder = LadderChat(FidelityLadder(rungs, budget=Budget()))
    with pytest.raises(ValueError, match="is a ladder, which cannot be held"):
        ladder.complete(USER, ChatSettings(grammar=GRAMMAR))
