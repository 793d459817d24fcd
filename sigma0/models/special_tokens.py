"""Special tokens in a prompt's text are encoded as text: `<|im_end|>` inside of a message must not end its turn.

Those that the chat template writes itself stay special. A copy of the tokenizer encodes every special token as text
(`encode_special_tokens` of the tokenizers library) and has a random alias for each of them. Special tokens in the
messages are replaced by marks while the template is rendered; the special tokens of the rendered text are then the
template's and are replaced by their aliases, and the marks by their text. The text around them is encoded as usual.

A template that joins parts of messages could still make a special token of two halves. So it is rendered a second time
with the first characters of special tokens hidden, and if a special token is missing there, this rendering is used.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

# Characters from which on a text is encoded without Python's lock, by threads of the tokenizers library, which cost
# more than a short text takes: about a millisecond.
_LONG = 2**12


class TextEncoder:
    """Encodes prompts with their special tokens as text. Thread-safe.

    Args:
        tokenizer: A fast transformers tokenizer; not changed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        tokens = special_tokens(tokenizer)
        nonce = secrets.token_hex(16)
        # longest first, as the tokenizer itself matches
        contents = sorted((token.content for token in tokens.values()), key=len, reverse=True)
        starts = sorted({content[0] for content in contents})
        self._marks = {text: f"{nonce}m{number}m" for number, text in enumerate([*contents, *starts])}
        self._aliases = {content: f"{nonce}a{number}a" for number, content in enumerate(contents)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        single = {token.content for token in tokens.values() if token.single_word}
        self._in_text = _any_of(map(re.escape, contents))
        # pieces of special tokens but for mere words, which names may end or begin with
        cuts = [(content[:at], content[at:]) for content in contents for at in range(1, len(content))]
        self._heads, self._tails = ({cut[side] for cut in cuts if not cut[side].isalnum()} for side in (0, 1))
        self._longest = max(map(len, contents), default=0)
        self._starts = _any_of(map(re.escape, starts))
        # a `single_word` token is not special inside of another word
        self._in_template = _any_of(_pattern(content, content in single) for content in contents)
        self._marked = _any_of(self._texts)
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        backend.add_tokens([_alias(token, self._aliases[token.content]) for token in tokens.values()])
        self._backend = backend
        self._ids = {backend.token_to_id(self._aliases[token.content]): number for number, token in tokens.items()}

    def text(self, text: str) -> list[int]:
        """Ids of a text, with the BOS and EOS that the tokenizer adds to every text."""
        return self._encoded(text)

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids of messages.

        Args:
            messages: Input of the chat template.
            render: Renders the chat template, given messages and tools, as a string.
            tools: Likewise its input.

        Raises:
            ValueError: For a special token in a name inside of them (an argument's, say), which is not replaced.
        """
        given = [dict(message) for message in messages], [dict(tool) for tool in tools]
        self._check_names(given)
        rendered = render(*self._hidden(given, self._in_text))
        halved = self._hidden(given, self._starts)
        if halved != list(given):
            safe = render(*halved)
            if self._in_template.findall(safe) != self._in_template.findall(rendered):
                rendered = safe
        aliased = self._in_template.sub(lambda match: self._aliases[match[0]], rendered)
        text = self._marked.sub(lambda match: self._texts[match[0]], aliased)
        return [self._ids.get(number, number) for number in self._encoded(text, add_special_tokens=False)]

    def _encoded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) < _LONG:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # a batch of one: `encode` holds Python's lock, so that other threads stand still while a long text is encoded
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _check_names(self, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                if result := self._in_text.search(str(name)):
                    raise ValueError(f"a name holds the special token {result[0]!r}: choose another name")
                if piece := self._piece(str(name)):
                    raise ValueError(
                        f"a name begins or ends with {piece!r}, a piece of a special token: choose another"
                    )
                self._check_names(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self._check_names(item)

    def _piece(self, name: str) -> str | None:
        """What a template could make a special token of, by what it writes around a name."""
        for size in range(1, min(self._longest, len(name) + 1)):
            for piece, known in ((name[-size:], self._heads), (name[:size], self._tails)):
                if piece in known:
                    return piece
        return None

    def _hidden(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """A copy of a value in which every match of a pattern is replaced by its mark."""
        if isinstance(value, str):
            return pattern.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, Mapping):
            return {name: self._hidden(item, pattern) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item, pattern) for item in value]
        return value


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, AddedToken]:
    """The special tokens of a fast transformers tokenizer, by id."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {number: token for number, token in added.items() if token.special}


def text_encoder(tokenizer: PreTrainedTokenizerFast) -> TextEncoder:
    """The cached encoder of a tokenizer; made again when tokens have been added."""
    size = tokenizer.backend_tokenizer.get_vocab_size(), len(special_tokens(tokenizer))
    known = _ENCODERS.get(tokenizer)
    if known is None or known[0] != size:
        known = _ENCODERS[tokenizer] = size, TextEncoder(tokenizer)
    return known[1]


_ENCODERS: WeakKeyDictionary[Any, tuple[tuple[int, int], TextEncoder]] = WeakKeyDictionary()


def _alias(token: AddedToken, alias: str) -> AddedToken:
    """A copy of a token that is not special, since the encoder takes special ones for text."""
    return AddedToken(
        alias, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized
    )


def _pattern(content: str, single_word: bool) -> str:
    return rf"(?<!\w){re.escape(content)}(?!\w)" if single_word else re.escape(content)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    # without patterns: matches nowhere
    return re.compile("|".join(patterns) or r"(?!)")
