"""Text that a teacher writes itself, as rows of token ids: chats whose user turns are sampled too."""

from collections.abc import Callable
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

HELD_OUT = 24
_MARK = "<user's turn>"


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

    Raises:
        ValueError: If the template ends a user's turn by no end-of-sequence token, or leaves no room in a row.
    """
    end, turn = tokenizer.eos_token_id, {"role": "user", "content": _MARK}
    text = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(_MARK))
    if end not in after[:-1]:
        raise ValueError(f"the chat template must end a user's turn by {tokenizer.eos_token!r}, and go on: {text!r}")
    if len(before) >= length:
        raise ValueError(f"the chat template takes {len(before)} tokens before a user's turn, rows have {length}")
    # what the template says between the turns, after the token that ends one
    between = torch.tensor(after[after.index(end) + 1 :])
    ids = torch.full((rows, length), -1)
    ids[:, : len(before)] = torch.tensor(before)
    generator = torch.Generator().manual_seed(seed)
    ended = torch.zeros(rows, dtype=torch.long)  # turns of each row
    template = torch.full((rows,), -1)  # which token of `between` comes next; -1: one that is drawn
    cache, fed = None, ids[:, : len(before)]
    for place in range(len(before), length):
        output = teacher(input_ids=fed.to(teacher.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        chances = (output.logits[:, -1].float().cpu() / temperature).softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
        fed = torch.where(template >= 0, between[template.clamp_min(0)], drawn)[:, None]
        ids[:, place] = torch.where(ended < 2, fed[:, 0], -1)
        ends = (fed[:, 0] == end) & (template < 0)
        template = torch.where(template >= 0, template + 1, template)
        template[template == len(between)] = -1
        template[ends & (ended == 0)] = 0
        ended = ended + ends
        if (ended >= 2).all():
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
        ValueError: If the file was drawn with other settings or by another teacher, or the temperature is not above 0.
    """
    if not 0 < temperature < inf:
        raise ValueError(f"the temperature must be a number above 0, got {temperature}")
    settings = {"seed": str(seed), "length": str(length), "temperature": str(temperature), "teacher": digest(teacher)}
    parts = []
    if path.exists():
        ids, drawn = read_text(path)
        if drawn != settings:
            raise ValueError(f"{path} was drawn with {drawn}, not {settings}")
        parts = [ids]
    count = sum(int((part >= 0).sum()) for part in parts)
    while count < tokens:
        done = sum(len(part) for part in parts)
        # of a seed torch's generator reads 32 bits
        parts.append(sample_rows(teacher, tokenizer, _ROWS, length, (seed << 20) + done, temperature))
        count += int((parts[-1] >= 0).sum())
        rows = torch.cat(parts)
        partial = path.with_suffix(".partial")
        # half the size, where the vocabulary allows it
        small = torch.uint16 if int(rows.max()) < 1 << 16 else torch.int32
        tensors = {"ids": rows[rows >= 0].to(small), "lengths": (rows >= 0).sum(1).int()}
        save_file(tensors, partial, metadata=settings)
        partial.replace(path)
        on_tokens(min(count, tokens))


def read_text(path: Path) -> tuple[Tensor, dict[str, str]]:
    """The rows, int32 `[R, S]`, and what they were drawn with.

    Raises:
        ValueError: If the file holds none.
    """
    try:
        with safe_open(path, "pt") as file:
            ids, lengths, settings = file.get_tensor("ids"), file.get_tensor("lengths"), file.metadata()
            rows = torch.full((len(lengths), int(settings["length"])), -1, dtype=torch.int32)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of rows: {error}") from error
    rows[torch.arange(rows.shape[1]) < lengths[:, None]] = ids.int()
    return rows, settings


def turns(tokenizer: Any, rows: Tensor) -> list[str]:
    """The users' turns of rows `[R, S]`, of those in which the turn ends."""
    before = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False).split(_MARK)[0]
    start, result = len(tokenizer.encode(before, add_special_tokens=False)), []
    for row in rows.tolist():
        if tokenizer.eos_token_id in row[start:]:
            end = row.index(tokenizer.eos_token_id, start)
            result.append(tokenizer.decode(row[start:end]))
    return result


def digest(model: Any) -> str:
    """Of a model's weights."""
    result = blake2b(digest_size=8)
    for weight in model.parameters():
        result.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return result.hexdigest()


_ROWS = 64
