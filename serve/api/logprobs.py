"""Log-probabilities as OpenAI tells them, for chats and for completions."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from sigma0.serve.engine.messages import TokenOutput

# JSON has no infinity; OpenAI tells this number of what is next to impossible.
LEAST = -9999.0


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The byte that each sign of a byte-level vocabulary stands for."""
    return {sign: byte for byte, sign in bytes_to_unicode().items()}


def token_text(tokenizer: Any, token_id: int) -> tuple[str, list[int] | None]:
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
        told = bytes(table[sign] for sign in piece)
        return told.decode(errors="replace"), list(told)
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    # part of a character that is told as bytes, which this kind of tokenizer does not tell
    return text, None if "\ufffd" in text else list(text.encode())


def finite(logprob: float | None) -> float:
    """A log-probability that JSON can hold."""
    return LEAST if logprob is None or not math.isfinite(logprob) else max(LEAST, logprob)


def chat_logprobs(tokenizer: Any, tokens: Sequence[TokenOutput]) -> dict[str, Any]:
    """As chats have them."""
    content = [
        {
            **_chat_token(tokenizer, token.id, token.logprob),
            "top_logprobs": [_chat_token(tokenizer, each.id, each.logprob) for each in token.alternatives],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Any, token_id: int, logprob: float | None) -> dict[str, Any]:
    text, told = token_text(tokenizer, token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": told}


def completion_logprobs(tokenizer: Any, tokens: Sequence[TokenOutput], offset: int, wanted: int) -> dict[str, Any]:
    """As completions have them.

    Args:
        tokenizer: A fast tokenizer.
        tokens: What is told of.
        offset: Length of the choice's text ahead of them.
        wanted: Alternatives beside each.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    top = [
        {token_text(tokenizer, each.id)[0]: finite(each.logprob) for each in reversed(token.alternatives)}
        for token in tokens
    ]
    return {
        "tokens": [token_text(tokenizer, token.id)[0] for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": top if wanted else None,
        "text_offset": offsets,
    }
