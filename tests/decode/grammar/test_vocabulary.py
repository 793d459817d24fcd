"""Ids as bytes: which grammars are kept, what an unusual tokenizer makes of them, and what a batch follows."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sigma0.decode.grammar import vocabulary as vocabularies
from sigma0.decode.grammar.spec import Choice, Regex
from sigma0.decode.grammar.vocabulary import Constraint, TokenTable, Vocabulary, grammars_of, vocabulary_of
from tests.byte_model import END, byte_tokenizer
from tests.decode.grammar.matching import TOKENIZER, VOCABULARY, refused


@pytest.mark.parametrize("eos, size", [([], 260), ([-1], 260), ([260], 260), ([3, 260], 260), ([-1, 3], 260)])
def test_an_end_is_an_id_of_the_head(eos, size):
    with refused(f"an id that ends an answer, under {size}"):
        Vocabulary(TOKENIZER, size, eos)


def test_the_first_and_the_last_id_may_be_ends():
    made = Vocabulary(TOKENIZER, 260, [259, 0])
    assert (made.size, made.eos) == (260, {0, 259})
    assert made.missing("a") == [] and Vocabulary(TOKENIZER, 300, [END]).size == 300


def test_characters_that_no_token_holds_are_told_in_order():
    assert VOCABULARY.missing("abé🙂") == []
    # id 0 stands for the first sign of the byte-level alphabet
    first = TOKENIZER.decode([0])
    assert Vocabulary(TOKENIZER, 260, [END, 0]).missing(f"b{first}a") == [first]
    narrow = Vocabulary(TOKENIZER, 40, [1])
    assert narrow.missing("zya!") == sorted(item for item in "zya!" if TOKENIZER(item)["input_ids"][0] >= 40)
    assert narrow.missing("zz") == ["z"]


def test_the_grammars_that_were_asked_for_last_are_kept(monkeypatch):
    assert vocabularies._KEPT <= 64
    monkeypatch.setattr(vocabularies, "_KEPT", 3)
    made, specs = Vocabulary(TOKENIZER, 260, [END]), [Choice((name,)) for name in "abcd"]
    a, b, c = (made.compile(spec) for spec in specs[:3])
    assert made.compile(specs[0]) is a
    made.compile(specs[3])
    assert list(made._grammars) == [specs[2], specs[0], specs[3]]
    assert made.compile(specs[2]) is c and made.compile(specs[0]) is a and made.compile(specs[1]) is not b


def test_a_vocabulary_is_made_once_for_a_tokenizer_a_size_and_its_ends():
    tokenizer = byte_tokenizer()
    made = vocabulary_of(tokenizer, 260, [END, 3])
    assert vocabulary_of(tokenizer, 260, (3, END)) is made
    assert vocabulary_of(tokenizer, 261, [END, 3]) is not made is not vocabulary_of(tokenizer, 260, [END])
    assert vocabulary_of(byte_tokenizer(), 260, [END, 3]) is not made


def test_a_table_of_ids():
    table = TokenTable([b"a", b"ab", b"", b"b", b"<x>", b"e"], [9, 6, 4, 2], [4, 2])
    assert table.eos_token_id == 4 and table.special_token_ids == [2, 4]
    assert table.tokens == [b"a", b"ab", b"<|2|>", b"b", b"<|4|>", b"e"]
    assert table.is_tokenizer_wrapper and table.bos_token_id is None
    # longest first; what no token spells is left out
    assert table("aab?b") == table(b"aab?b") == [0, 1, 3] and table("") == [] and table("<x>") == []


def letters(known, decoder, special="<end>"):
    ids = {symbol: item for item, symbol in enumerate([special, *known])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=special))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special, unk_token=special)


def test_a_decoder_that_is_not_known_is_asked_for_every_id():
    made = Vocabulary(letters(["a", "b", "ba"], decoders.Fuse()), 6, [0])
    assert [made.engine.decode_bytes([item]) for item in (1, 2, 3)] == [b"a", b"b", b"ba"]
    matcher = made.compile(Regex("(ba)+")).matcher()
    # V may be larger than the tokenizer's, and ids past it are never allowed
    assert matcher.mask().tolist() == [1 << 3]
    matcher.take(3)
    assert matcher.mask().tolist() == [1 | 1 << 2 | 1 << 3]
    with refused("tokens follow each other as they are"):
        Vocabulary(letters(["a", "b"], decoders.WordPiece()), 6, [0])


def test_text_that_looks_special_is_text():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|call|>", special=False), AddedToken("<|other|>", special=True)])
    call, other = tokenizer.convert_tokens_to_ids(["<|call|>", "<|other|>"])
    made = Vocabulary(tokenizer, 300, [END])
    assert not made.engine.is_special_token(call) and made.engine.is_special_token(other)
    matcher = made.compile(Regex("<[|]call[|]>")).matcher()
    bits = matcher.mask()
    assert bits[call // 32] >> (call % 32) & 1
    matcher.take(call)
    matcher.check(END)
    assert made.engine.decode_bytes([tokenizer("a")["input_ids"][0]]) == b"a"


def test_what_a_batch_follows():
    one = Constraint(Choice(("a",)), TOKENIZER)
    both = grammars_of(one, 2, 260, [END], 1)
    assert both.per_sequence[0] is both.per_sequence[1] is not None and both.forces and one.forces
    some = grammars_of([None, one], 2, 260, [END], None)
    assert some.per_sequence == (None, both.per_sequence[0]) and some.forces
    assert not grammars_of([one, Constraint(Choice(("a",)), TOKENIZER, forces=False)], 2, 260, [END], None).forces
    assert both.limit == 1 and some.limit is None
    with refused("the shortest answer that follows it takes 3 tokens, and 2 are allowed"):
        grammars_of(Constraint(Choice(("abc", "bcde")), TOKENIZER), 1, 260, [END], 2)
    for wrong in ([one], [one, one, one], [one, Choice(("a",))]):
        with refused("takes a Constraint, or 2 of them or None"):
            grammars_of(wrong, 2, 260, [END], None)
