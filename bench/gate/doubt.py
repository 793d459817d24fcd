"""Free runs at full depth, and what each score doubts about their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import chat_messages
from sigma0.bench.pocket.items import Item
from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models import OuroForCausalLM

LONGEST_ANSWER = 24
_ROWS = 25


@dataclass(frozen=True)
class Doubts:
    """Whole answers; arrays `[n]`.

    Attributes:
        wrong: 1 where the answer is wrong.
        scores: High where the answer should be kept back. `saturated`: share of its tokens that reached T without
            meeting the rule; `gate survival`: the largest chance, by the gate, that no loop was enough; `entropy`
            (nats) and `margin` (1 minus the lead of the top token): those of the least sure token at loop T;
            `length`: tokens of the prompt.
        oracle: For each answer, the first loop with loop T's argmax of every token after the first.
        settled: The same for the first loop from which on it stays.
    """

    wrong: NDArray[np.float64]
    scores: dict[str, NDArray[np.float64]]
    oracle: tuple[tuple[int, ...], ...]
    settled: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Answer:
    wrong: bool
    scores: dict[str, float]
    oracle: list[int]
    settled: list[int]


def read_doubts(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rule: ExitRule,
    items: Sequence[Item],
    on_item: Callable[[int], None] = lambda done: None,
) -> Doubts:
    """Answer items greedily at full depth, every other one as chat."""
    answers: list[_Answer] = []
    for start in range(0, len(items), _ROWS):
        answers += _run(model, tokenizer, rule, items[start : start + _ROWS], start)
        on_item(len(answers))
    return Doubts(
        wrong=np.array([answer.wrong for answer in answers], dtype=np.float64),
        scores={name: np.array([answer.scores[name] for answer in answers]) for name in answers[0].scores},
        oracle=tuple(tuple(answer.oracle[1:]) for answer in answers),
        settled=tuple(tuple(answer.settled[1:]) for answer in answers),
    )


def prompt_text(tokenizer: PreTrainedTokenizerFast, item: Item, chat: bool) -> str:
    """What stands before the answer, as the model is to read it."""
    if not chat:
        return item.prompt
    text = tokenizer.apply_chat_template(chat_messages([item])[:1], tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


@torch.no_grad()
def _run(
    model: OuroForCausalLM, tokenizer: PreTrainedTokenizerFast, rule: ExitRule, items: Sequence[Item], first: int
) -> list[_Answer]:
    prompts = [prompt_text(tokenizer, item, (first + place) % 2 == 1) for place, item in enumerate(items)]
    batch = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    batch = batch.to(model.device)
    full = ExitConfig(mode="full")
    written = model.generate(**batch, max_new_tokens=LONGEST_ANSWER, do_sample=False, exit_config=full)
    start = batch["input_ids"].shape[1]
    mask = torch.cat([batch["attention_mask"], torch.ones_like(written[:, start:])], 1)
    output = model.model(input_ids=written, attention_mask=mask, use_cache=False)
    states = output.loop_states[:, :, start - 1 : -1]  # [T, B, N, D]
    gates = output.gate_logits[:, :, start - 1 : -1]
    met = select_exits(rule, states, gates, model.lm_head).met
    logits = model.lm_head(states)  # [T, B, N, V]
    same = logits.argmax(-1) == logits[-1].argmax(-1)
    oracle = same.int().argmax(0) + 1
    settled = len(same) + 1 - same.int().flip(0).cumprod(0).sum(0)
    chances = torch.softmax(logits[-1].float(), -1)
    entropy = torch.special.entr(chances).sum(-1)  # [B, N]
    top = chances.topk(2, -1).values
    survival = torch.sigmoid(-gates.float()).prod(0)
    found = []
    for number, item in enumerate(items):
        ids = written[number, start:].tolist()
        end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        span = (number, slice(0, end))
        scores = {
            "saturated": (~met[span]).float().mean().item(),
            "gate survival": survival[span].max().item(),
            "entropy": entropy[span].max().item(),
            "margin": 1 - (top[..., 0] - top[..., 1])[span].min().item(),
            "length": float(batch["attention_mask"][number].sum()),
        }
        text = tokenizer.decode(ids[:end], skip_special_tokens=True).strip()
        found.append(_Answer(text != item.answer, scores, oracle[span].tolist(), settled[span].tolist()))
    return found
