"""A tokenizer's ids as bytes, which grammars are matched with."""

import importlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerFast

from sigma0.decode.grammar.compiled import CompiledGrammar, Grammars, TokenizerRecipe, TokenTable, compile_grammar
from sigma0.decode.grammar.spec import Spec
from sigma0.decode.grammar.trial import GrammarTrial

MISSING = (
    "structured output needs llguidance, which is not installed: pip install 'sigma0-lm[structured]', or leave the "
    "schema, regex, choice or grammar out"
)
# Grammars that a vocabulary keeps.
_KEPT = 64
# Ids of which two in a row are decoded together, to see whether that gives their texts and nothing else.
_PROBED = 512


class Vocabulary:
    """The ids of a model as bytes, and the grammars that were compiled for them.

    Args:
        tokenizer: A fast tokenizer.
        size: V of the head; ids past the tokenizer's are never allowed.
        eos: Ids that end an answer, at least one.

    Attributes:
        size: V.
        eos: As given.
        engine: llguidance's table of the ids.
        texts: What they stand for; b"" for those that are no text.

    Raises:
        ValueError: Without llguidance, without an end id, or for a tokenizer that joins its tokens by something that is
            in none of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, size: int, eos: Iterable[int]) -> None:
        self.size, self.eos = size, frozenset(eos)
        known = min(size, len(tokenizer))
        ends = sorted(self.eos)
        if not ends or not 0 <= ends[0] <= ends[-1] < size:
            raise ValueError(
                f"structured output needs an id that ends an answer, under {size}; this model has {ends or 'none'}: "
                "set eos_token_id"
            )
        try:
            importlib.import_module("llguidance")
        except ImportError as error:
            raise ValueError(MISSING) from error
        self._recipe = TokenizerRecipe(_as_json(tokenizer), size, known, self.eos)
        try:
            self.engine, self.texts = self._recipe.build()
        except ValueError:
            # another decoder than those of byte-level and SentencePiece vocabularies
            self._recipe = replace(self._recipe, source=_decoded_table(tokenizer, size, ends))
            self.engine, self.texts = self._recipe.build()
        else:
            texts = _texts_for_special(tokenizer, self.engine, known)
            if texts:
                self._recipe = replace(self._recipe, source=_relisted_table(tokenizer, self.engine, texts, size, ends))
                self.engine, self.texts = self._recipe.build()
        self._grammars: OrderedDict[Spec, CompiledGrammar] = OrderedDict()
        # a server parses requests in threads
        self._lock = Lock()

    def trial(self) -> GrammarTrial:
        """A process that tries strangers' grammars, which `compile` takes afterwards."""
        return GrammarTrial(self._recipe)

    def check_characters(self, spec: Spec) -> None:
        """Refuses a spec that the ids cannot spell.

        Raises:
            ValueError: Naming the characters.
        """
        lacks = self.missing(spec.needs())
        if lacks:
            raise ValueError(
                f"this model's vocabulary cannot write what is asked for: none of its tokens holds "
                f"{', '.join(repr(item) for item in lacks)}"
            )

    def missing(self, characters: Iterable[str]) -> list[str]:
        """Characters that occur in no token, in their order."""
        known = frozenset(b"".join(self.texts.tokens))
        return sorted(item for item in set(characters) if not known.issuperset(item.encode()))

    def compile(self, spec: Spec) -> CompiledGrammar:
        """The grammar of a spec; the last few are kept.

        Raises:
            ValueError: In one line, for a spec that is wrong or cannot be enforced, or that the ids cannot spell.
        """
        with self._lock:
            known = self._grammars.get(spec)
        if known is None:
            self.check_characters(spec)
            # not under the lock: others need not wait for a large one
            known = compile_grammar(spec, self.engine, self.texts)
        with self._lock:
            self._grammars[spec] = known
            self._grammars.move_to_end(spec)
            while len(self._grammars) > _KEPT:
                self._grammars.popitem(last=False)
        return known


def _as_json(tokenizer: PreTrainedTokenizerFast) -> str:
    # a copy, since padding and truncation are no part of a vocabulary
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _decoded_table(tokenizer: PreTrainedTokenizerFast, size: int, ends: Sequence[int]) -> TokenTable:
    """The ids of any tokenizer, with the bytes that each is decoded to."""
    known = min(size, len(tokenizer))
    special = set(tokenizer.all_special_ids) | set(ends)
    texts = ["" if item in special else _decoded(tokenizer, [item]) for item in range(known)]
    plain = [item for item in range(known) if item not in special][:_PROBED]
    for first, second in pairwise(plain):
        if _decoded(tokenizer, [first, second]) != texts[first] + texts[second]:
            raise ValueError(
                "structured output needs a tokenizer whose tokens follow each other as they are; this one writes "
                f"{_decoded(tokenizer, [first, second])!r} for {texts[first]!r} and {texts[second]!r}"
            )
    return TokenTable([*(text.encode() for text in texts), *[b""] * (size - known)], special, ends)


def _texts_for_special(tokenizer: PreTrainedTokenizerFast, engine: Any, known: int) -> frozenset[int]:
    """Ids that are text, such as `<tool_call>`, which llguidance takes for special by their looks."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    plain = (number for number, token in added.items() if number < known and not token.special)
    return frozenset(number for number in plain if engine.is_special_token(number))


def _relisted_table(
    tokenizer: PreTrainedTokenizerFast, engine: Any, texts: frozenset[int], size: int, ends: Sequence[int]
) -> TokenTable:
    """The ids of llguidance's own table, of which some more are text."""
    special = [item for item in range(size) if item in ends or (item not in texts and engine.is_special_token(item))]
    return TokenTable([engine.decode_bytes([item]) for item in range(size)], special, ends, _as_json(tokenizer))


def _decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


_VOCABULARIES: "WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], Vocabulary]]" = WeakKeyDictionary()
_MAKING = Lock()


def vocabulary_of(tokenizer: PreTrainedTokenizerFast, size: int, eos: Iterable[int]) -> Vocabulary:
    """The vocabulary of a tokenizer and a head, made once; arguments as `Vocabulary` takes them."""
    key = size, frozenset(eos)
    with _MAKING:
        made = _VOCABULARIES.setdefault(tokenizer, {})
        if key not in made:
            made[key] = Vocabulary(tokenizer, size, eos)
        return made[key]


@dataclass(frozen=True)
class Constraint:
    """What an answer has to be, and the tokenizer that spells it: `model.generate(..., grammar=Constraint(...))`.

    Attributes:
        spec: What an answer has to be.
        tokenizer: The model's.
        forces: Whether ids that are the only ones allowed are fed without a reading, where that changes no answer.
    """

    spec: Spec
    tokenizer: PreTrainedTokenizerFast
    forces: bool = True


def grammars_of(
    wanted: Constraint | Sequence[Constraint | None], batch: int, size: int, eos: Iterable[int], limit: int | None
) -> Grammars:
    """The grammars of a batch.

    Args:
        wanted: One for all sequences, or one for each.
        batch: B.
        size: V of the head.
        eos: Ids that end an answer.
        limit: New tokens of a sequence at most; None for any number.

    Raises:
        ValueError: For another number of them, as `Vocabulary.compile` does, and where no answer fits into the limit.
    """
    item = [wanted] * batch if isinstance(wanted, Constraint) else list(wanted)
    if len(item) != batch or not all(one is None or isinstance(one, Constraint) for one in item):
        raise ValueError(f"grammar takes a Constraint, or {batch} of them or None, one for each sequence")
    ends = frozenset(eos)
    made = tuple(None if one is None else vocabulary_of(one.tokenizer, size, ends).compile(one.spec) for one in item)
    for grammar in made:
        if grammar is not None:
            grammar.check_limit(limit)
    return Grammars(made, all(one is None or one.forces for one in item), limit)
