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
    if not isinstance(prompt, str) and not _are_messages(prompt):
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


def with_text(prompt: str | Messages) -> str | Messages:
    """The prompt with the text parts of each message joined by line breaks, since few chat templates take parts.

    Raises:
        ValueError: For content that is no text.
    """
    if isinstance(prompt, str) or not _are_messages(prompt):
        return prompt
    return [_with_text(message) for message in prompt]


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f'a part of a message is {{"type": "text", "text": ...}}, got {part!r:.60}')
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"the content of a message is a string or a list of text parts, got {content!r:.60}")
    return {**message, "content": content}


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
