"""A lower bound on the tokens of a text from its length alone, so that a text which can never fit is not tokenized.

A token of a byte-level vocabulary stands for as many bytes as it is long, so B bytes make at least B / (longest token)
tokens. That holds only where every step of the tokenizer keeps what it is given: a normalizer that deletes, a
pre-tokenizer that drops spaces, or unknown tokens that stand for text of any length leave no bound. Then all texts are
tokenized.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from sigma0.config import Messages

# A character of a canonical composition comes of four at most (U+1F82), and decomposing never makes fewer.
_COMPOSED = 4
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
# What templates are tried with: every one of these must come out as it went in.
_PROBE = (
    ("system", "aq0 system"),
    ("user", "aq1 user"),
    ("assistant", "<think>aq2 thought</think>\n\naq2 answer"),
    ("user", "aq3 user"),
    ("assistant", "<think>aq4 thought</think>\n\naq4 answer"),
    ("user", "aq5 user"),
)


# Messages from which on what the template puts around each is counted too.
MANY_MESSAGES = 64


class TokenBound:
    """Of one tokenizer.

    Args:
        tokenizer: A fast tokenizer.

    Attributes:
        longest: Bytes (of a byte-level vocabulary) or characters that one token stands for at most; None where there
            is no such number.
        unit: What it counts: `bytes` or `characters`.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        spec: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
        self.unit = "bytes" if _is_byte_level(spec) else "characters"
        self.longest = _longest(spec)
        self._tokenizer = tokenizer
        self._keeps_messages = self.longest is not None and _keeps_messages(tokenizer)

    def tokens_of(self, prompt: str | Messages, most: int) -> int:
        """Tokens that a prompt has at least; 0 where nothing can be said.

        Args:
            prompt: A text, or messages that no template was applied to yet.
            most: Over which the caller refuses it.

        Returns:
            The bound; of messages that the chat template refuses it is that of nothing.
        """
        if self.longest is None:
            return 0
        if isinstance(prompt, str):
            return -(-self._size(prompt) // self.longest)
        # templates may strip a message, so spaces at its ends do not count
        size = sum(self._size(str(message["content"]).strip()) for message in prompt) if self._keeps_messages else 0
        if not self._keeps_messages or (len(prompt) > MANY_MESSAGES and size <= most * self.longest):
            # what the template adds to each counts as well, and is cheap beside tokenizing it
            size = self._size(_rendered(self._tokenizer, prompt))
        return -(-size // self.longest)

    def _size(self, text: str) -> int:
        return len(text.encode()) if self.unit == "bytes" else len(text)


def _longest(spec: Mapping[str, Any]) -> int | None:
    """The longest token times what normalizing may shrink a text by; None where a token may stand for any length."""
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout") is not None or spec.get("truncation") is not None:
        return None
    if not (_is_byte_level(spec) and _has_all_bytes(model["vocab"], _byte_symbols())) and not (
        model.get("byte_fallback") and _has_all_bytes(model["vocab"], [f"<0x{byte:02X}>" for byte in range(256)])
    ):
        # a character that the vocabulary has not leaves no token, or one for many
        return None
    shrinks = _shrinks_by(spec.get("normalizer"))
    if shrinks is None or not _keeps_text(spec.get("pre_tokenizer")):
        return None
    added = spec.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in added):
        # with the spaces around it
        return None
    if _is_byte_level(spec) and spec.get("normalizer") is not None:
        # a character has one to four bytes: normalizing may turn four into one without making a character less
        shrinks *= 4
    return shrinks * max(len(each.encode()) if each in _contents(added) else len(each) for each in _tokens(spec))


def _tokens(spec: Mapping[str, Any]) -> list[str]:
    return [*spec["model"]["vocab"], *_contents(spec.get("added_tokens") or [])]


def _contents(added: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(token["content"]) for token in added)


def _shrinks_by(normalizer: Mapping[str, Any] | None) -> int | None:
    """Characters that may become one; None where they may become none."""
    if normalizer is None:
        return 1
    kind = str(normalizer["type"])
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            factor = _shrinks_by(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(pattern) // len(content)) if pattern and content else None
    return _NORMALIZERS.get(kind)


def _keeps_text(splitter: Mapping[str, Any] | None) -> bool:
    if splitter is None:
        return True
    if splitter["type"] == "Sequence":
        return all(map(_keeps_text, splitter["pretokenizers"]))
    return splitter["type"] in _SPLITTERS and splitter.get("behavior") != "Removed"


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    steps = [spec.get("pre_tokenizer"), spec.get("normalizer")]
    flat = [step for part in steps if part for step in _flat(part)]
    return any(step["type"] == "ByteLevel" for step in flat)


def _flat(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part.get("pretokenizers") or part.get("normalizers") or [] for step in _flat(inner)]


def _byte_symbols() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())


def _has_all_bytes(vocabulary: Mapping[str, int], symbols: Sequence[str]) -> bool:
    return all(symbol in vocabulary for symbol in symbols)


def _keeps_messages(tokenizer: Any) -> bool:
    """Whether the chat template shows every message whole, thoughts of earlier turns among them."""
    if getattr(tokenizer, "chat_template", None) is None:
        return False
    messages = [{"role": role, "content": content} for role, content in _PROBE]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError, TypeError, KeyError):
        # of a template that knows no system turn, say: it is not known to keep anything
        return False
    return all(content in text for _, content in _PROBE)


def _rendered(tokenizer: Any, messages: Messages) -> str:
    """Messages as the chat template shows them, without what it adds at the end; "" where it refuses them."""
    is_open = messages[-1].get("role") == "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, continue_final_message=is_open
            )
        )
    except (TemplateError, ValueError):
        # whoever tokenizes them says why
        return ""
