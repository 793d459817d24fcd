"""Grammars of a vocabulary, and where a sequence stands in one."""

import importlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sigma0.decode.grammar.bounds import check_grammar, check_schema
from sigma0.decode.grammar.calls import lark_of
from sigma0.decode.grammar.spec import Choice, Grammar, JsonObject, JsonSchema, Regex, Spec, ToolCalls

Bits = npt.NDArray[np.int32]
# As `json.dumps` writes it. Where white space is free, a model may go on writing it for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(ValueError):
    """A sequence has left its grammar, or cannot go on in it."""


class Matcher:
    """Where a sequence stands in its grammar: after some of its ids, which can be taken back.

    Args:
        matcher: llguidance's, before the first id.
        size: V.
        eos: Ids that end an answer.

    Attributes:
        count: Ids that were taken.
    """

    def __init__(self, matcher: Any, size: int, eos: frozenset[int]) -> None:
        self._matcher, self._size, self._eos = matcher, size, eos
        self.count = 0

    def back_to(self, count: int) -> None:
        """Takes back all ids but the first `count`."""
        assert 0 <= count <= self.count, f"{count} ids of {self.count}"
        if count < self.count:
            if not self._matcher.rollback(self.count - count):
                raise GrammarError(f"the grammar's state cannot go back: {_one_line(self._matcher.get_error())}")
            self.count = count

    def check(self, token_id: int) -> None:
        """Refuses an id that may not follow, or an end where there may be none.

        Raises:
            GrammarError: Where a setting beside the grammar has left no id that it allows.
        """
        allowed = (
            self._matcher.is_accepting() if token_id in self._eos else self._matcher.validate_tokens([token_id]) == 1
        )
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
        self.count += 1

    def mask(self) -> Bits:
        """Ids that may follow, a bit each, int32 `[ceil(V / 32)]`.

        Raises:
            GrammarError: If there is none.
        """
        words = -(-self._size // 32)
        read = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[:words]
        bits: Bits = np.zeros(words, dtype=np.int32)
        bits[: len(read)] = read
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")
        if not bits.any():
            raise GrammarError("the grammar cannot go on: no token of this model's vocabulary fits here")
        return bits


class CompiledGrammar:
    """A grammar over the ids of a vocabulary.

    Args:
        matcher: llguidance's, before the first id.
        size: V.
        eos: Ids that end an answer.
    """

    def __init__(self, matcher: Any, size: int, eos: frozenset[int]) -> None:
        self._matcher, self._size, self._eos = matcher, size, eos

    def matcher(self) -> Matcher:
        """A sequence before its first new id."""
        return Matcher(self._matcher.deep_copy(), self._size, self._eos)


@dataclass(frozen=True)
class Grammars:
    """What the sequences of a batch follow.

    Attributes:
        each: Of every sequence; None for nothing.
        forces: Whether ids that are the only ones allowed are fed without a reading, where that changes no answer.
    """

    each: tuple[CompiledGrammar | None, ...]
    forces: bool = True


def compile_grammar(spec: Spec, engine: Any, size: int, eos: frozenset[int]) -> CompiledGrammar:
    """The grammar of a spec.

    Args:
        spec: What an answer has to be.
        engine: llguidance's table of the ids.
        size: V.
        eos: Ids that end an answer.

    Raises:
        ValueError: In one line, for a spec that is wrong or cannot be enforced.
    """
    llguidance = importlib.import_module("llguidance")
    name, text = _source(spec, llguidance.LLMatcher)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, engine, limits=limits)
    if is_error:
        raise ValueError(f"{name} cannot be followed: {_one_line(messages[0])}")
    compiled = CompiledGrammar(llguidance.LLMatcher(engine, text, log_level=0, limits=limits), size, eos)
    try:
        compiled.matcher().mask()
    except GrammarError as error:
        raise ValueError(f"{name} cannot be followed: {error}") from error
    return compiled


def _source(spec: Spec, kind: Any) -> tuple[str, str]:
    """The name of a spec's kind, and llguidance's text of it."""
    match spec:
        case JsonSchema():
            lenient = {} if spec.strict else {"lenient": True}
            check_schema(spec.schema)
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
            for tool in spec.tools:
                check_schema(tool.schema.schema)
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
