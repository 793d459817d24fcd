"""Teacher-forced depths and oracles, one text and one token at a time."""

import numpy as np
import pytest
import torch

from sigma0.bench.gate.forced import KINDS, agreement, read_forced
from sigma0.bench.pocket.data import encode
from sigma0.bench.pocket.world import draw
from sigma0.config import ExitConfig

CONFIGS = {"margin": ExitConfig(mode="margin", theta=0.6), "early": ExitConfig(mode="qexit", q=0.5)}
ITEMS = [draw("test", 3, index, questions=1).items[0] for index in range(27)]


@pytest.fixture(scope="module")
def tokens(pocket):
    model, tokenizer = pocket
    rules = {name: model.exit_rule(config) for name, config in CONFIGS.items()}
    return read_forced(model, tokenizer, rules, ITEMS)


def test_every_token_equals_a_run_of_its_text_alone(pocket, tokens):
    model, tokenizer = pocket
    for number in (0, 1, 25, 26):
        ids = torch.tensor([encode(tokenizer, [ITEMS[number]], number % 2 == 1).ids])
        mine = tokens.where(tokens.item == number)
        assert len(mine.kind) == ids.shape[1] - 1
        for name, config in CONFIGS.items():
            with torch.no_grad():
                output = model(ids, exit_config=config, output_loop_states=True)
            top = output.loop_logits[:, 0, :-1].argmax(-1).T.tolist()  # [S - 1][T]
            assert mine.exits[name].tolist() == output.exit_depths[0, :-1].tolist()
            assert mine.same[name].tolist() == [
                int(path[depth - 1] == path[-1]) for path, depth in zip(top, mine.exits[name], strict=True)
            ]
        assert mine.oracle.tolist() == [1 + path.index(path[-1]) for path in top]
        for path, settled in zip(top, mine.settled, strict=True):
            assert set(path[settled - 1 :]) == {path[-1]}
            assert settled == 1 or path[settled - 2] != path[-1]


def test_kinds_follow_the_text(pocket, tokens):
    _, tokenizer = pocket
    for number, item in enumerate(ITEMS):
        chat = number % 2 == 1
        ids = encode(tokenizer, [item], chat).ids[1:]
        kinds = [KINDS[kind] for kind in tokens.kind[tokens.item == number]]
        assert kinds.count("key") == kinds.count("end") == 1
        assert item.key.endswith(tokenizer.decode([ids[kinds.index("key")]]).strip())
        answer = [token for token, kind in zip(ids, kinds, strict=True) if kind != "prompt"]
        assert tokenizer.decode(answer, skip_special_tokens=True).strip() == item.answer
        marks = encode(tokenizer, [item], chat).answer[1:]
        assert tokens.is_answer[tokens.item == number].tolist() == marks
        assert ids[kinds.index("end")] == tokenizer.eos_token_id
    assert (tokens.is_answer == (tokens.kind != KINDS.index("prompt"))).all()


def test_agreement_is_a_share_of_tokens(tokens):
    found = agreement(tokens, "early")
    assert found.value == pytest.approx(np.mean(tokens.same["early"]))
    low, high = found.interval
    assert low <= found.value <= high


def test_full_depth_agrees_with_itself(pocket):
    model, tokenizer = pocket
    full = read_forced(model, tokenizer, {"full": model.exit_rule(ExitConfig(mode="full"))}, ITEMS[:3])
    assert agreement(full, "full").value == 1.0 and set(full.exits["full"]) == {model.num_loops}
    assert (full.oracle <= full.settled).all() and full.settled.max() <= model.num_loops
