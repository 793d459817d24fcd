"""A prompt as token ids: strings as they are, messages through the chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sigma0.config import Messages
from sigma0.models.special_tokens import text_encoder


def encode(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Messages,
    special_tokens: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    **template: Any,
) -> Tensor:
    """Ids `[1, P]` of a prompt: a string is continued as it is, messages go through the chat template.

    If the last message is the assistant's, it is the beginning of the answer and is continued.

    Args:
        tokenizer: A fast transformers tokenizer.
        prompt: A string, or messages with `role` and `content`.
        special_tokens: Whether a special token in the prompt (say `<|im_end|>`) is that token; by default it is text,
            and only the chat template's own are special.
        tools: That the chat template shows beside messages.
        **template: Further variables of the chat template.

    Raises:
        ValueError: For an empty prompt, a tokenizer without a chat template, or one that is not fast.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"a fast tokenizer is needed, got {type(tokenizer).__name__}")
    if not isinstance(prompt, str) and (
        not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt)
    ):
        raise ValueError(f"a prompt is a string or a list of messages, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError("the prompt is empty")
    if isinstance(prompt, str):
        if not special_tokens:
            return torch.tensor([text_encoder(tokenizer).text(prompt)], dtype=torch.long)
        # verbose=False: our own error names a text over the limit
        ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template; pass the prompt as one string")
    else:
        # the assistant's turn at the end is left open
        open_turn = prompt[-1].get("role") == "assistant"
        template |= {"add_generation_prompt": not open_turn, "continue_final_message": open_turn}

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
            return str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **template))

        try:
            if not special_tokens:
                return torch.tensor([text_encoder(tokenizer).messages(prompt, render, tools)], dtype=torch.long)
            messages, shown = [dict(message) for message in prompt], [dict(tool) for tool in tools]
            ids = tokenizer.apply_chat_template(
                messages, tools=shown or None, return_tensors="pt", return_dict=True, **template
            )["input_ids"]
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
    encoded: Tensor = ids
    if not encoded.numel():
        raise ValueError(f"the prompt has no tokens: {prompt!r:.60}")
    return encoded
