"""Free runs at full depth, and what each score doubts about their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models import OuroForCausalLM
from sigma0.models.prompts import encode

LONGEST_ANSWER = 24
_ROWS = 25


@dataclass(frozen=True)
class Doubt:
    """A whole answer."""

    wrong: bool  # Whether it is wrong
    # High where the answer should be kept back. `saturated`: share of its tokens that reached T without meeting
    # the rule; `gate survival`: the largest chance, by the gate, that no loop was enough; `entropy` (nats) and
    # `margin` (1 minus the lead of the top token): those of the least sure token at loop T; `length`: tokens of
    # the prompt
    scores: dict[str, float]
    oracle: tuple[int, ...]  # First loop with loop T's argmax, of every token after the first
    settled: tuple[int, ...]  # The same for the first loop from which on it stays


def read_doubts(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rule: ExitRule,
    prompts: Sequence[Prompt],
    on_answer: Callable[[int], None] = lambda done: None,
) -> list[Doubt]:
    """Answer prompts with known answers greedily at full depth."""
    result: list[Doubt] = []
    for start in range(0, len(prompts), _ROWS):
        result += _run(model, tokenizer, rule, prompts[start : start + _ROWS])
        on_answer(len(result))
    return result


@torch.no_grad()
def _run(
    model: OuroForCausalLM, tokenizer: PreTrainedTokenizerFast, rule: ExitRule, prompts: Sequence[Prompt]
) -> list[Doubt]:
    rows = [encode(tokenizer, prompt.content)[0].tolist() for prompt in prompts]
    batch = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt").to(model.device)
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
    result = []
    for number, prompt in enumerate(prompts):
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
        loops = (tuple(entry[number, 1:end].tolist()) for entry in (oracle, settled))
        result.append(Doubt(text != prompt.answer, scores, *loops))
    return result
