"""Text that a teacher writes itself, as rows of token ids: chats whose user turns are sampled too."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

HELD_OUT = 16


@torch.inference_mode()
def sample_rows(teacher: Any, tokenizer: Any, rows: int, length: int, seed: int, temperature: float) -> Tensor:
    """Chats of one turn.

    The chat template is followed up to where the user's turn begins. There the teacher writes; where it ends that turn,
    the template goes on up to the answer.

    Args:
        teacher: A causal model.
        tokenizer: Its own, with a chat template.
        rows: R.
        length: S.
        seed: What is drawn.
        temperature: At which it is drawn, above 0.

    Returns:
        int32 `[R, S]`, -1 after the end of a chat.
    """
    mark = "USER"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(mark))
    end = tokenizer.eos_token_id
    # what the template says between the turns, after the token that ends one
    between = torch.tensor(after[after.index(end) + 1 :])
    ids = torch.full((rows, length), -1)
    ids[:, : len(before)] = torch.tensor(before)
    generator = torch.Generator().manual_seed(seed)
    turn = torch.zeros(rows, dtype=torch.long)
    template = torch.full((rows,), -1)  # which token of `between` comes next; -1: one that is drawn
    cache, fed = None, ids[:, : len(before)]
    for place in range(len(before), length):
        output = teacher(input_ids=fed.to(teacher.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        chances = (output.logits[:, -1].float().cpu() / temperature).softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
        fed = torch.where(template >= 0, between[template.clamp_min(0)], drawn)[:, None]
        ids[:, place] = torch.where(turn < 2, fed[:, 0], -1)
        ends = (fed[:, 0] == end) & (template < 0)
        template = torch.where(template >= 0, template + 1, template)
        template[template == len(between)] = -1
        template[ends & (turn == 0)] = 0
        turn = turn + ends
        if (turn >= 2).all():
            break
    return ids.int()


def write_text(
    teacher: Any,
    tokenizer: Any,
    path: Path,
    tokens: int,
    length: int,
    seed: int,
    temperature: float,
    on_tokens: Callable[[int], None],
) -> None:
    """Samples until the file holds so many tokens; a file that is there is gone on with.

    Raises:
        ValueError: If the file was drawn with another seed, length or temperature, or the temperature is not above 0.
    """
    if not 0 < temperature < inf:
        raise ValueError(f"the temperature must be a number above 0, got {temperature}")
    parts, settings = [], {"seed": str(seed), "length": str(length), "temperature": str(temperature)}
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.metadata() != settings:
                raise ValueError(f"{path} was drawn with {file.metadata()}, not {settings}")
        parts = [read_text(path)]
    count = sum(int((part >= 0).sum()) for part in parts)
    while count < tokens:
        done = sum(len(part) for part in parts)
        parts.append(sample_rows(teacher, tokenizer, _ROWS, length, (seed << 32) + done, temperature))
        count += int((parts[-1] >= 0).sum())
        partial = path.with_suffix(".partial")
        save_file({"ids": torch.cat(parts)}, partial, metadata=settings)
        partial.replace(path)
        on_tokens(min(count, tokens))


def read_text(path: Path) -> Tensor:
    """The rows, int32 `[R, S]`."""
    with safe_open(path, "pt") as file:
        ids: Tensor = file.get_tensor("ids")
    return ids


_ROWS = 64
