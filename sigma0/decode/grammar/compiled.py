"""Grammars of a vocabulary, and where a sequence stands in one."""

import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sigma0.decode.grammar.bounds import check_grammar, check_spec
from sigma0.decode.grammar.calls import lark_of
from sigma0.decode.grammar.closing import (
    Bits,
    Texts,
    closing_mask,
    closing_way,
    ending_number,
    is_near,
    is_whole,
    leads_to_end,
    least_answer,
)
from sigma0.decode.grammar.spec import Choice, Grammar, JsonObject, JsonSchema, Regex, Spec, ToolCalls

# As `json.dumps` writes it. Where white space is free, a model may go on writing it for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(ValueError):
    """A sequence has left its grammar, or cannot go on in it."""


class Matcher:
    """Where a sequence stands in its grammar: after some of its ids, which can be taken back.

    Args:
        matcher: llguidance's, before the first id.
        grammar: That it is of.

    Attributes:
        count: Ids that were taken.
    """

    def __init__(self, matcher: Any, grammar: "CompiledGrammar") -> None:
        self._matcher, self._grammar = matcher, grammar
        self._ids: list[int] = []
        # the way to an end that is known after each number of ids, near a limit
        self._ways: list[list[int] | None] = []

    @property
    def count(self) -> int:
        """Ids that were taken."""
        return len(self._ids)

    def back_to(self, count: int) -> None:
        """Takes back all ids but the first `count`."""
        assert 0 <= count <= self.count, f"{count} ids of {self.count}"
        if count < self.count:
            if not self._matcher.rollback(self.count - count):
                raise GrammarError(f"the grammar's state cannot go back: {_one_line(self._matcher.get_error())}")
            del self._ids[count:], self._ways[count + 1 :]

    def check(self, token_id: int) -> None:
        """Refuses an id that may not follow, or an end where there may be none.

        Raises:
            GrammarError: Where a setting beside the grammar has left no id that it allows.
        """
        is_end = token_id in self._grammar.texts.eos
        allowed = self._matcher.is_accepting() if is_end else self._matcher.validate_tokens([token_id]) == 1
        if not allowed:
            raise GrammarError(
                "the grammar and the other settings (minimal length, bad words, penalties, processors) leave no id"
            )

    def take(self, token_id: int) -> None:
        """Takes the next id.

        Raises:
            GrammarError: As `check` does.
        """
        self.check(token_id)
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")
        self._ids.append(token_id)

    def mask(self, limit: int | None = None) -> Bits:
        """Ids that may follow, a bit each, int32 `[ceil(V / 32)]`.

        Args:
            limit: Tokens that the answer may have at most; None for any number. Near to it, only those ids may follow
                after which the answer can still end in time.

        Raises:
            GrammarError: If there is none.
        """
        texts = self._grammar.texts
        words = -(-len(texts.tokens) // 32)
        read = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[:words]
        bits: Bits = np.zeros(words, dtype=np.int32)
        bits[: len(read)] = read
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")
        if not bits.any():
            raise GrammarError("the grammar cannot go on: no token of this model's vocabulary fits here")
        if self._grammar.is_json and texts.ends_number(self._ids):
            bits = ending_number(texts, bits)
        left, reach = 0 if limit is None else limit - self.count, self._grammar.reach
        if limit is not None and self._grammar.least is not None and is_near(left, reach):
            way = self._way(left)
            if way is not None:
                bits = closing_mask(self._matcher, texts, bits, left, reach, way)
        return bits

    def _way(self, left: int) -> list[int] | None:
        """A way of at most `left` tokens to an end: the rest of the one before, or that one, or else a new one.

        It is that of the ids alone, since each of them is masked as it is taken, also where others were taken back.
        """
        count, ways = self.count, self._ways
        ways += [None] * (count - len(ways))
        if len(ways) == count:
            before = ways[-1] if ways else None
            if before and before[0] == self._ids[-1]:
                ways.append(before[1:])
            elif before and len(before) <= left and leads_to_end(self._matcher, self._grammar.texts, before):
                ways.append(before)
            else:
                ways.append(closing_way(self._matcher, self._grammar.texts, left))
        return ways[count]


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar over the ids of a vocabulary.

    Attributes:
        start: llguidance's matcher, before the first id.
        texts: Of the vocabulary.
        least: Tokens of the shortest answer that was found; None where none was.
        reach: Tokens that one token may add to the shortest way to the end.
        is_json: Whether its numbers have a greatest length.
    """

    start: Any
    texts: Texts
    least: int | None = None
    reach: int = 0
    is_json: bool = False

    def matcher(self) -> Matcher:
        """A sequence before its first new id."""
        return Matcher(self.start.deep_copy(), self)

    def check_limit(self, limit: int | None) -> None:
        """Refuses a limit of tokens under which no answer can end.

        Raises:
            ValueError: Naming the tokens of the shortest one.
        """
        if limit is not None and self.least is not None and limit < self.least:
            raise ValueError(f"the shortest answer that follows it takes {self.least} tokens, and {limit} are allowed")


@dataclass(frozen=True)
class Grammars:
    """What the sequences of a batch follow.

    Attributes:
        per_sequence: Of every sequence; None for nothing.
        forces: Whether ids that are the only ones allowed are fed without a reading, where that changes no answer.
        limit: New tokens of a sequence at most; None for any number.
    """

    per_sequence: tuple[CompiledGrammar | None, ...]
    forces: bool = True
    limit: int | None = None


class TokenTable:
    """A table of ids as llguidance takes it.

    Args:
        tokens: The bytes of each id; b"" for one that is never allowed.
        special: Ids that are no text.
        eos: Ids that end an answer.
        source: The tokenizer as JSON, where its ids are these: texts that a grammar forces are cut as it cuts them.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(
        self, tokens: Sequence[bytes], special: Iterable[int], eos: Sequence[int], source: str | None = None
    ) -> None:
        self.eos_token_id = eos[0]
        self._tokenizer = None if source is None else Tokenizer.from_str(source)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < len(tokens))
        names = {token_id: f"<|{token_id}|>".encode() for token_id in self.special_token_ids}
        self.tokens = [names.get(token_id, text) for token_id, text in enumerate(tokens)]
        spelled = [entry for entry in enumerate(self.tokens) if entry[1] and entry[0] not in names]
        self._ids = {text: token_id for token_id, text in reversed(spelled)}
        # longest first, so that a text is cut into few tokens
        self._lengths = sorted(set(map(len, self._ids)), reverse=True)

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text; what no token spells is left out."""
        rest, ids, place = text.encode() if isinstance(text, str) else text, [], 0
        if self._tokenizer is not None and is_whole(rest):
            return list(self._tokenizer.encode(rest.decode(), add_special_tokens=False).ids)
        while place < len(rest):
            for length in self._lengths:
                piece = rest[place : place + length]
                if piece in self._ids:
                    ids.append(self._ids[piece])
                    place += len(piece)
                    break
            else:
                place += 1
        return ids


@dataclass(frozen=True)
class TokenizerRecipe:
    """What llguidance's table of ids is made of, here or in another process.

    Attributes:
        source: A fast tokenizer as JSON, or a table.
        size: V of the head; ids past the tokenizer's are never allowed.
        known: Ids of the tokenizer.
        eos: Ids that end an answer.
    """

    source: str | TokenTable
    size: int
    known: int
    eos: frozenset[int]

    def build(self) -> tuple[Any, Texts]:
        """Llguidance's table, and what the ids stand for: b"" for those that are no text.

        Raises:
            ValueError: For a tokenizer that llguidance does not know.
        """
        llguidance = importlib.import_module("llguidance")
        engine = llguidance.LLTokenizer(self.source, n_vocab=self.size, eos_token=sorted(self.eos))
        special = {token_id for token_id in range(self.known) if engine.is_special_token(token_id)} | self.eos
        known = (b"" if token_id in special else engine.decode_bytes([token_id]) for token_id in range(self.known))
        return engine, Texts([*known, *[b""] * (self.size - self.known)], self.eos)


def compile_grammar(spec: Spec, engine: Any, texts: Texts) -> CompiledGrammar:
    """The grammar of a spec.

    Args:
        spec: What an answer has to be.
        engine: llguidance's table of the ids.
        texts: Of the same ids.

    Raises:
        ValueError: In one line, for a spec that is wrong, too large, or cannot be enforced.
    """
    llguidance = importlib.import_module("llguidance")
    reach = check_spec(spec)
    name, text = _source(spec, llguidance.LLMatcher)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, engine, limits=limits)
    if is_error:
        raise ValueError(f"{name} cannot be followed: {_one_line(messages[0])}")
    start = llguidance.LLMatcher(engine, text, log_level=0, limits=limits)
    is_json = isinstance(spec, JsonSchema | JsonObject | ToolCalls)
    try:
        CompiledGrammar(start, texts).matcher().mask()
        # with the way to an end: what the engine gives up on there, it gives up on in every answer
        shortest = least_answer(start, texts)
    except ValueError as error:
        raise ValueError(f"{name} cannot be followed: {_one_line(str(error))}") from error
    return CompiledGrammar(start, texts, None if shortest is None else len(shortest), reach, is_json)


def _source(spec: Spec, kind: Any) -> tuple[str, str]:
    """The name of a spec's kind, and llguidance's text of it."""
    match spec:
        case JsonSchema():
            lenient = {} if spec.strict else {"lenient": True}
            text = "{}" if json.loads(spec.schema) is True else spec.schema
            return "schema", kind.grammar_from_json_schema(text, defaults={**_LAYOUT, **lenient})
        case JsonObject():
            return "json_object", kind.grammar_from_json_schema('{"type": "object"}', defaults=_LAYOUT)
        case Regex():
            return "regex", kind.grammar_from_regex(spec.pattern)
        case Choice():
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choices)
            # a terminal: of a rule with over 2,000 alternatives the parser gives up at the second id
            return "choice", kind.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
        case ToolCalls():
            return "tools", kind.grammar_from_lark(lark_of(spec, _LAYOUT))
        case Grammar():
            try:
                lark = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(spec.grammar)
            except Exception as error:
                raise ValueError(f"grammar cannot be followed: {_one_line(str(error))}") from error
            check_grammar(lark)
            return "grammar", kind.grammar_from_lark(lark)


def _one_line(message: str) -> str:
    """An engine's message without its drawings."""
    lines = [line.strip() for line in message.splitlines()]
    return "; ".join(line for line in lines if line and not set(line) <= set("^|~ "))[:400]
