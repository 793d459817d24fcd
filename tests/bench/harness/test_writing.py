import json

import pytest

import sigma0
from sigma0.bench.harness.items import TASKS
from sigma0.bench.harness.scoring import WriteSettings, truncate_at_stop, write
from sigma0.config import ExitConfig
from sigma0.signals.savings import savings

GREEDY = {"do_sample": False}
EXITS = [
    ExitConfig(mode="full"),
    ExitConfig(mode="qexit", q=0.6),
    ExitConfig(mode="qexit", q=0.6, after_exit="verify"),
    ExitConfig(mode="margin", theta=0.5, after_exit="drop"),
]


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line)["prompt"] for line in (TASKS / "micro_world_answer.jsonl").read_text().splitlines()[:5]]


def written(pocket, prompts, exit_config, until=(), new=24):
    model, tokenizer = pocket
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return write(model, tokenizer, ids, WriteSettings(exit_config, new, tuple(until), GREEDY))


@pytest.mark.parametrize("exit_config", EXITS, ids=lambda config: f"{config.mode}-{config.after_exit}")
def test_a_batch_writes_what_generate_writes_alone(pocket, prompts, exit_config):
    batch = written(pocket, prompts, exit_config)
    for prompt, text, reading in zip(prompts, batch.texts, batch.readings, strict=True):
        known = sigma0.generate(*pocket, prompt, exit_config=exit_config, max_new_tokens=24, verdict=False)
        assert text == known.text
        assert reading.depths == tuple(token.depth for token in known.tokens)
        assert reading.reasons == tuple(token.reason for token in known.tokens)


def test_a_batch_takes_fewer_passes_than_its_rows_alone(pocket, prompts):
    batch = written(pocket, prompts, EXITS[1])
    alone = [written(pocket, [prompt], EXITS[1]).cost for prompt in prompts]
    assert batch.cost.passes < sum(cost.passes for cost in alone)
    assert batch.cost.prompt_rows == sum(cost.prompt_rows for cost in alone)
    depths = [reading.depths for reading in batch.readings]
    assert savings(depths, batch.cost.passes, batch.cost.rows, pocket[0].num_loops).passes_saved > 0


def test_a_text_ends_ahead_of_the_first_string(pocket, prompts):
    whole = written(pocket, prompts[:2], EXITS[1]).texts
    stopped = written(pocket, prompts[:2], EXITS[1], until=(" in the", " comes from"))
    assert [truncate_at_stop(text, (" in the", " comes from")) for text in whole] == list(stopped.texts)
    assert all(len(short) < len(text) for short, text in zip(stopped.texts, whole, strict=True))


def test_a_long_prompt_loses_its_beginning(pocket):
    model, tokenizer = pocket
    ids = tokenizer("Mary went to the kitchen. " * 600)["input_ids"]
    limit = model.config.max_position_embeddings
    batch = write(model, tokenizer, [ids[-200:], ids], WriteSettings(EXITS[0], 4, (), GREEDY))
    assert [reading.truncated for reading in batch.readings] == [0, len(ids) - (limit - 4)]
    with pytest.raises(ValueError, match="leaves no room"):
        write(model, tokenizer, [ids], WriteSettings(EXITS[0], limit, (), GREEDY))
