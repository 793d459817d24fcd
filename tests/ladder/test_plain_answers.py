"""Whole answers of a model without loops: its text, its signs, and what it cost."""

import copy

import pytest
import torch

from sigma0.ladder import Always, FidelityLadder, Never, Rung, replay
from sigma0.ladder.answer_unit import Attempt, Writer
from sigma0.ladder.budget import Budget, BudgetTracker, Spending
from sigma0.ladder.trail import Trail
from sigma0.models.looped_causal import PROMPT_CHUNK
from sigma0.signals.canary import CollapseCanary
from sigma0.signals.verdict import DoorPolicy

PROMPT, NEW = "Mary went to the park. Where is", 6


def writer_of(*rungs, stop=()):
    return Writer(rungs, DoorPolicy(), None, stop, BudgetTracker(Budget()), Trail(), (PROMPT,))


def steps(model, ids, new):
    """Greedy ids one by one without a cache, and the logits of each in float64."""
    ids, rows = list(ids), []
    for _ in range(new):
        with torch.no_grad():
            rows.append(model(torch.tensor([ids])).logits[0, -1])
        ids.append(int(rows[-1].argmax()))
    return ids[-new:], torch.stack(rows)


def test_a_plain_model_s_answer(plain, tokenizer):
    rung = Rung.local(plain, tokenizer, "plain")
    writer = writer_of(rung, rung)
    attempt, output = writer.write(0, PROMPT, NEW)
    prompt = tokenizer(PROMPT)["input_ids"]
    new, logits = steps(plain, prompt, NEW)
    chances = torch.softmax(logits.double(), -1)
    top = chances.topk(2).values
    margins = (top[:, 0] - top[:, 1]).tolist()
    least = min(range(NEW), key=margins.__getitem__)
    assert output == "ok" and attempt.text == tokenizer.decode(new, skip_special_tokens=True)
    assert attempt.entropy == pytest.approx(float(torch.special.entr(chances).sum(-1).mean()), rel=1e-4)
    assert attempt.margin == pytest.approx(margins[least], rel=1e-3) and attempt.stop_reason == "length"
    assert attempt.sure == tokenizer.decode(new[:least], skip_special_tokens=True) and attempt.tokens == ()
    canary = CollapseCanary(1)
    read = zip(logits, torch.tensor(new), strict=True)
    near = [float(canary.observe(row[None], item[None]).proximity) for row, item in read]
    assert attempt.verdict.proximity == pytest.approx(max(near), abs=1e-4)
    cost = writer.costs[0]
    assert (cost.prompt_passes, cost.passes, cost.tokens, cost.read) == (1, NEW - 1, NEW, len(prompt))
    assert cost.rows == len(prompt) + NEW - 1 and 0 < cost.seconds < 60
    assert cost.parameters == sum(part.numel() for part in plain.model.layers.parameters())
    assert cost.block_bytes == 4 * cost.parameters
    (line,) = writer.trail.lines
    assert (line.rung, line.step, line.told) == (0, "write 0", "ok") and line.seconds == cost.seconds
    assert line.cost == writer.purse.spent == Spending(loop_passes=NEW)
    writer.write(1, PROMPT, NEW)
    assert writer.trail.lines[1].cost == Spending(NEW, NEW, len(prompt))


def test_the_most_that_an_answer_costs(looped, plain, tokenizer):
    count = len(tokenizer(PROMPT)["input_ids"])
    writer = writer_of(Rung.local(plain, tokenizer, "plain"), Rung.local(looped[0], tokenizer, "small"))
    assert writer.forecast(0, PROMPT, NEW) == Spending(loop_passes=1 + NEW)
    assert writer.forecast(1, PROMPT, NEW) == Spending(4 * (1 + NEW), NEW, count)
    long = " ".join(["park"] * (PROMPT_CHUNK + 1))
    many = len(tokenizer(long)["input_ids"])
    chunks = -(-many // PROMPT_CHUNK)
    assert chunks > 1
    assert writer.forecast(1, long, NEW) == Spending(4 * (chunks + NEW), NEW, many)
    writer = writer_of(Rung.local(looped[0], tokenizer, "small"), Rung.local(plain, tokenizer, "plain"))
    assert writer.forecast(1, long, NEW) == Spending(1 + NEW, NEW, many)
    # a prompt of nothing is refused where it is written
    assert writer.forecast(1, "", NEW) == Spending()
    with pytest.raises(ValueError, match="empty"):
        writer.forecast(0, "", NEW)


def test_a_text_ends_by_an_id_a_string_or_its_length(plain, tokenizer):
    model = copy.copy(plain)
    model.generation_config = copy.deepcopy(plain.generation_config)
    rung = Rung.local(model, tokenizer, "plain")
    new, _ = steps(plain, tokenizer(PROMPT)["input_ids"], NEW)
    word = tokenizer.decode(new[1:2]).strip()
    stopped, _ = writer_of(rung, stop=[word]).write(0, PROMPT, NEW)
    assert stopped.stop_reason == "stop" and word in stopped.text
    assert writer_of(rung, stop=["no such word"]).write(0, PROMPT, NEW)[0].stop_reason == "length"
    model.generation_config.eos_token_id = new[2]
    writer = writer_of(rung)
    ended, _ = writer.write(0, PROMPT, NEW)
    assert ended.stop_reason == "eos" and writer.costs[0].tokens == new.index(new[2]) + 1


def test_answers_climb_over_models_of_both_kinds(looped, plain, tokenizer):
    rungs = [Rung.local(plain, tokenizer, "plain"), Rung.local(looped[0], tokenizer, "small")]
    below = FidelityLadder(rungs, policy=Never()).generate(PROMPT, unit="answer", max_new_tokens=NEW)
    new, _ = steps(plain, tokenizer(PROMPT)["input_ids"], NEW)
    assert (below.rung, below.text) == ("plain", tokenizer.decode(new, skip_special_tokens=True))
    assert below.tokens == () and below.spent == Spending(loop_passes=NEW)
    above = FidelityLadder(rungs, policy=Always()).generate(PROMPT, unit="answer", max_new_tokens=NEW)
    assert above.rung == "small" and len(above.tokens) == NEW == above.spent.large_tokens
    assert {(item.rung, item.handed_up) for item in above.tokens} == {("small", "answer")}
    assert above.spent.loop_passes == sum(cost.passes + cost.prompt_passes for cost in above.costs)
    assert replay(above.trail) == []


def test_a_warm_start_keeps_what_fits(looped, plain, tokenizer):
    rung = Rung.local(looped[0], tokenizer, "small")
    writer = writer_of(rung, rung, Rung.endpoint("http://127.0.0.1:1/v1", "far"))
    draft = Attempt("in the park", None, None, None, "eos", "in the")
    kept = len(tokenizer("in the", add_special_tokens=False)["input_ids"])
    assert writer.given(1, PROMPT, NEW, None).kept == ""
    warm = writer.given(1, PROMPT, kept + 1, draft)
    assert (warm.prompt, warm.kept, warm.new) == (f"{PROMPT}in the", "in the", 1)
    cold = writer.given(1, PROMPT, kept, draft)
    assert (cold.prompt, cold.kept, cold.new) == (PROMPT, "", kept)
    for prompt in (PROMPT, [{"role": "user", "content": PROMPT}]):
        asked = writer.given(2, prompt, NEW, draft)
        assert [message["role"] for message in asked.prompt] == ["user", "user"]
        assert asked.prompt[0]["content"] == PROMPT
        assert all(text in asked.prompt[1]["content"] for text in ("in the park", "may be wrong"))
        assert (asked.kept, asked.new) == ("", NEW)
    limit = looped[0].config.max_position_embeddings
    room = limit - len(tokenizer(f"{PROMPT}in the")["input_ids"])
    assert writer.given(1, PROMPT, room + kept, draft).kept == "in the"
    assert writer.given(1, PROMPT, room + kept + 1, draft).kept == ""
