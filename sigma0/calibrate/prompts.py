"""Prompts from a file: paragraphs of a text, or JSON lines with answers where they are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sigma0.config import Messages
from sigma0.jsonl import read_lines, read_text
from sigma0.models.prompts import encode

MAX_PROMPTS = 100_000


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class PromptLine(BaseModel):
    """One line of a JSON Lines file.

    Attributes:
        prompt: Text to be continued as it is, or the turns of a chat.
        answer: What a right continuation says, where that is known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | tuple[Message, ...]
    answer: str | None = None

    @field_validator("prompt")
    @classmethod
    def _is_not_empty(cls, value: str | tuple[Message, ...]) -> str | tuple[Message, ...]:
        if not value:
            raise ValueError("is empty")
        return value


@dataclass(frozen=True)
class Prompt:
    """What a model is to continue, and the answer where it is known."""

    content: str | Messages
    answer: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts.

    Args:
        path: `*.jsonl`: one object a line, see `PromptLine`. Any other file: UTF-8 text, one prompt a paragraph
            (paragraphs are separated by empty lines).

    Raises:
        ValueError: If the file is missing, not UTF-8, empty, too long, or a line is malformed; names the line.
    """
    prompts = read_lines(path, _prompt, "prompt") if path.suffix == ".jsonl" else _paragraphs(read_text(path))
    if not prompts:
        raise ValueError(f"{str(path)!r} holds no prompt")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"{str(path)!r} holds {len(prompts)} prompts, more than {MAX_PROMPTS}; split it")
    return prompts


def encode_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[tuple[int, ...]]:
    """Ids of prompts, each with room for what is to come.

    Raises:
        ValueError: For a prompt that is empty or does not fit into the model's context; names its number from 1.
    """
    limit = model.config.max_position_embeddings
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids: Tensor = encode(tokenizer, prompt.content)[0]
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
        if not len(ids):
            raise ValueError(f"prompt {number} has no tokens: {prompt.content!r}")
        if len(ids) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, which with {max_new_tokens} new ones exceed the model's "
                f"context of {limit}; shorten it or lower the new tokens"
            )
        encoded.append(tuple(ids.tolist()))
    return encoded


def _paragraphs(text: str) -> list[Prompt]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    return [Prompt("\n".join(part)) for part in parts if part]


def _prompt(line: str) -> Prompt:
    """A prompt out of one JSON line."""
    parsed = PromptLine.model_validate_json(line)
    content = parsed.prompt if isinstance(parsed.prompt, str) else [turn.model_dump() for turn in parsed.prompt]
    return Prompt(content, parsed.answer)
