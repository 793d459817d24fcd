"""Log-probabilities in OpenAI's shapes, for chats and for completions."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sigma0.serve.engine.messages import PromptToken, TokenOutput

# JSON has no infinity; OpenAI sends this number for very improbable tokens.
LEAST = -9999.0


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary."""
    return {sign: byte for byte, sign in bytes_to_unicode().items()}


def token_text(tokenizer: PreTrainedTokenizerFast, token_id: int) -> tuple[str, list[int] | None]:
    """A token by itself, and its bytes; None where these are not known.

    Args:
        tokenizer: A fast tokenizer.
        token_id: Any id, also one beyond the vocabulary.
    """
    piece = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
    if piece is None:
        return "", None
    table = _byte_of()
    if type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel" and all(sign in table for sign in piece):
        raw = bytes(table[sign] for sign in piece)
        return raw.decode(errors="replace"), list(raw)
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    # an incomplete character, whose bytes this kind of tokenizer does not expose
    return text, None if "\ufffd" in text else list(text.encode())


def finite(logprob: float | None) -> float:
    """A log-probability that JSON can hold."""
    return LEAST if logprob is None or not math.isfinite(logprob) else max(LEAST, logprob)


def chat_logprobs(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[TokenOutput]) -> dict[str, Any]:
    """In the shape of chats."""
    content = [
        {
            **_chat_token(tokenizer, token.id, token.logprob),
            "top_logprobs": [_chat_token(tokenizer, other.id, other.logprob) for other in token.alternatives],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: PreTrainedTokenizerFast, token_id: int, logprob: float | None) -> dict[str, Any]:
    text, raw = token_text(tokenizer, token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": raw}


def completion_logprobs(
    tokenizer: PreTrainedTokenizerFast, tokens: Sequence[TokenOutput], offset: int, wanted: int
) -> dict[str, list[Any] | None]:
    """In the shape of completions.

    Args:
        tokenizer: A fast tokenizer.
        tokens: The tokens.
        offset: Length of the choice's text before them.
        wanted: Number of alternatives of each.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token_text(tokenizer, token.id)[0] for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(tokenizer, token) for token in tokens] if wanted else None,
        "text_offset": offsets,
    }


def echoed_logprobs(
    tokenizer: PreTrainedTokenizerFast,
    first_id: int,
    prompt: Sequence[PromptToken],
    new: dict[str, list[Any] | None],
) -> dict[str, list[Any] | None]:
    """Those of a prompt and of what was written after it, in the shape of completions.

    Args:
        tokenizer: A fast tokenizer.
        first_id: Of the prompt, of which there is no log-probability.
        prompt: The others.
        new: As `completion_logprobs` gives them, with offsets after the prompt's text.
    """
    texts = [token_text(tokenizer, item)[0] for item in (first_id, *(token.id for token in prompt))]
    ends = list(accumulate(map(len, texts)))
    current: dict[str, list[Any]] = {
        "tokens": texts,
        "token_logprobs": [None, *(finite(token.logprob) for token in prompt)],
        "top_logprobs": [None, *(_top(tokenizer, token) for token in prompt)],
        "text_offset": [0, *ends[:-1]],
    }
    return {name: None if values is None else current[name] + values for name, values in new.items()}


def _top(tokenizer: PreTrainedTokenizerFast, token: TokenOutput | PromptToken) -> dict[str, float]:
    return {token_text(tokenizer, other.id)[0]: finite(other.logprob) for other in reversed(token.alternatives)}
