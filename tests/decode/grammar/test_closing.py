"""Answers end within their limits: random walks over masks, against what a JSON parser and counting say."""

import json
import random

import pytest
from tokenizers import AddedToken

from sigma0.decode.grammar import closing
from sigma0.decode.grammar.closing import NUMBER, Texts, ids_of, is_near
from sigma0.decode.grammar.spec import Choice, Grammar, JsonObject, JsonSchema, Regex
from sigma0.decode.grammar.vocabulary import vocabulary_of
from tests.byte_model import END, byte_tokenizer
from tests.decode.grammar.matching import TOKENIZER, VOCABULARY
from tests.decode.grammar.test_bounds import asks_for
from tests.schemas import record

PERSON = record(
    {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}},
        "of": asks_for(a={"type": "string", "minLength": 3}, b={"type": "array", "minItems": 2}),
    },
    ["name", "age"],
)
A = asks_for(t={"const": "a"}, v={"type": "string", "minLength": 30})
TREE = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 3}]}
# with the characters of the shortest answer, each of which is a token here
SHORTEST = [
    (JsonSchema.of(PERSON), len('{"name": "", "age": 0}')),
    (JsonSchema.of({"type": "array", "items": PERSON, "minItems": 1}), len('[{"name": "", "age": 0}]')),
    (JsonSchema.of({"anyOf": [PERSON, {"type": "null"}, {"const": "abc"}]}), 4),
    (JsonSchema.of({"type": "string", "minLength": 7}), 9),
    (JsonSchema.of({"type": "integer", "minimum": 1000}), 4),
    (JsonSchema.of({"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a"]}), len('{"a": 0}')),
    (JsonSchema.of(True), 1),
    (JsonObject(), 2),
    # a branch is no other's for the ids that follow next
    (JsonSchema.of({"anyOf": [A, asks_for(t={"const": "b"})]}), 10),
    (JsonSchema.of({"$ref": "#/$defs/n", "$defs": {"n": TREE}}), 4),
    # what a token begins may be long
    (JsonSchema.of({"type": "array", "items": {"type": "string", "pattern": "^[a-f0-9]{64}$"}}), 2),
    (JsonSchema.of({"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}}}), 2),
    (Choice(("abcdef", "abd")), 3),
    (Regex("a{5}b*"), 5),
    (Grammar('start: "a" start | "bc"'), 2),
]


def walk(grammar, limit, seed):
    """Ids of a random answer; only an END, or the limit, ends it."""
    chooser, matcher, ids = random.Random(seed), grammar.matcher(), []
    while len(ids) < limit:
        chosen = chooser.choice(ids_of(matcher.mask(limit)).tolist())
        if chosen == END:
            break
        matcher.take(chosen)
        ids.append(chosen)
    # whether it may end here, whatever the limit
    matcher.check(END)
    return TOKENIZER.decode(ids)


@pytest.mark.grid(fast=5, slow=6)
@pytest.mark.parametrize("spec, least", SHORTEST, ids=[str(spec)[:60] for spec, _ in SHORTEST])
def test_the_shortest_answer_is_found_and_every_answer_ends_within_its_limit(spec, least):
    grammar = VOCABULARY.compile(spec)
    assert grammar.least == least
    for limit in (least, least + 1, least + 2, least + 5, least + 17, 80, 300):
        for seed in range(3):
            text = walk(grammar, limit, seed)
            if isinstance(spec, JsonSchema | JsonObject):
                json.loads(text)


def test_numbers_end_whatever_tokens_they_are_written_with():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(item, special=False) for item in ("12", "345", "6789", ', "', '"}', "true", "[[")])
    vocabulary = vocabulary_of(tokenizer, len(tokenizer), {END})
    both = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a", "b"]}
    assert vocabulary.compile(JsonSchema.of(both)).least == len('{"a": 0, "b": 0}') - 2
    assert vocabulary.compile(JsonSchema.of({"type": "array", "minItems": 1})).least == 3


def test_a_limit_that_is_far_restricts_nothing(monkeypatch):
    grammar = VOCABULARY.compile(JsonSchema.of(PERSON))
    # as of a large vocabulary, of which not every id can be tried
    monkeypatch.setattr(closing, "_TRIED", 1)
    matcher = grammar.matcher()
    for item in TOKENIZER('{"name": "abc')["input_ids"]:
        matcher.take(item)
    assert is_near(300, 1) and (matcher.mask(300) == matcher.mask()).all()
    assert (grammar.matcher().mask(5000) == grammar.matcher().mask()).all()
    assert (grammar.matcher().mask(1000) == grammar.matcher().mask()).all()


def test_of_a_large_vocabulary_plain_text_is_sampled_and_all_else_is_tried(monkeypatch):
    grammar = VOCABULARY.compile(JsonSchema.of(PERSON))
    matcher, text = grammar.matcher(), TOKENIZER('{"name": "abc')["input_ids"]
    for item in text:
        matcher.take(item)
    for left in range(len('", "age": 0}'), 21):
        monkeypatch.setattr(closing, "_TRIED", 256)
        every = matcher.mask(len(text) + left)
        monkeypatch.setattr(closing, "_TRIED", 20)
        assert (matcher.mask(len(text) + left) == every).all(), left
    assert set(TOKENIZER('\\"a')["input_ids"]) <= set(ids_of(every))


def test_a_mask_near_the_limit_does_not_depend_on_the_way_to_it():
    grammar = VOCABULARY.compile(JsonSchema.of(PERSON))
    text = TOKENIZER('{"name": "abc", "age": 12')["input_ids"]
    one, other = grammar.matcher(), grammar.matcher()
    for item in text:
        one.mask(40)
        one.take(item)
    for item in (*text[:12], *TOKENIZER('xyz", "age": 5')["input_ids"]):
        other.take(item)
    other.back_to(12)
    for item in text[12:]:
        other.take(item)
    assert (one.mask(40) == other.mask(40)).all() and (one.mask(40) != one.mask()).any()


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_has_a_greatest_length(kind):
    grammar = VOCABULARY.compile(JsonSchema.of({"type": "array", "items": {"type": kind}}))
    matcher = grammar.matcher()
    for item in TOKENIZER("[" + "7" * NUMBER)["input_ids"]:
        matcher.take(item)
    assert set(ids_of(matcher.mask())) == set(TOKENIZER(",]")["input_ids"])
    matcher.back_to(NUMBER)
    assert set(TOKENIZER("123,]")["input_ids"]) <= set(ids_of(matcher.mask()))


def test_digits_of_a_text_and_numbers_that_cannot_end_go_on():
    for spec, text in (
        (JsonSchema.of({"type": "string"}), '"' + "7" * 40),
        (JsonSchema.of({"type": "number"}), "7" * (NUMBER - 1) + "."),
        (JsonSchema.of({"type": "string", "pattern": "^[0-9]{50}$"}), '"' + "7" * 40),
        (Regex("[0-9]+"), "7" * 40),
    ):
        matcher = VOCABULARY.compile(spec).matcher()
        for item in TOKENIZER(text)["input_ids"]:
            matcher.take(item)
        assert TOKENIZER("7")["input_ids"][0] in ids_of(matcher.mask()), spec


def test_what_ends_in_a_number():
    texts = Texts([b"a1", b"23", b"", b"-", b"4" * NUMBER, b"5" * (NUMBER - 2)], frozenset({2}))
    for ids, ends in (
        ([4], True),
        ([0, 5], False),
        ([1, 5], True),
        ([0, 3, 5], True),
        ([1, 0, 5], False),
        ([1, 2, 5], False),
    ):
        assert texts.ends_number(ids) == ends, ids


@pytest.mark.parametrize("text", ["a<|im_end|>", "<|im_end|>"])
def test_an_end_inside_of_an_answer_is_refused(pocket, text):
    model, tokenizer = pocket
    vocabulary = vocabulary_of(tokenizer, model.config.vocab_size, {tokenizer.eos_token_id})
    for spec in (Choice((text,)), Grammar('start: <|im_end|> "a"')):
        with pytest.raises(ValueError, match="cannot be followed"):
            vocabulary.compile(spec)
