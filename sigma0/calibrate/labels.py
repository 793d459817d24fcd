"""Labels where nobody knows the answers: what the model says at full depth, or what a larger one says.

"Right" then means no more than "the same text". A confidence fitted on such labels is a chance of agreement: it knows
nothing of what the reference gets wrong itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from sigma0.api import generate
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.prompts import encode


def label_prompts(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 64,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> list[Prompt]:
    """The prompts with what a model says as their answers, greedily; a looped one at full depth.

    Args:
        model: Whose answers count as right.
        tokenizer: Its fast tokenizer.
        prompts: To be labelled; answers that they have are put aside.
        max_new_tokens: New tokens of each prompt at most.
        on_prompt: Told how many prompts are done.
    """
    labelled = []
    for done, prompt in enumerate(prompts, start=1):
        labelled.append(replace(prompt, answer=_answer(model, tokenizer, prompt, max_new_tokens)))
        on_prompt(done)
    return labelled


def _answer(model: Any, tokenizer: PreTrainedTokenizerFast, prompt: Prompt, max_new_tokens: int) -> str:
    if isinstance(model, DepthGenerationMixin):
        full = ExitConfig(mode="full")
        settings: dict[str, Any] = {"exit_config": full, "max_new_tokens": max_new_tokens, "do_sample": False}
        return generate(model, tokenizer, prompt.content, verdict=False, **settings).text
    ids = encode(tokenizer, prompt.content).to(model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
