"""A text's length bounds its tokens from below, and never above what the tokenizer makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sigma0.serve.api.bounds import MANY_MESSAGES, TokenBound

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FORGETFUL = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
FAR = 10**9


def fast(vocabulary, *, normalizer=None, splitter=None, template=None, **model):
    backend = Tokenizer(models.BPE(vocab={item: place for place, item in enumerate(vocabulary)}, merges=[], **model))
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    made.chat_template = template
    return made


def byte_level(**settings):
    settings.setdefault("splitter", pre_tokenizers.ByteLevel(add_prefix_space=False))
    return fast(sorted(ALPHABET), **settings)


def test_the_shipped_model_has_a_bound(pocket):
    bound = TokenBound(pocket[1])
    assert bound.unit == "bytes" and bound.longest == len('{"action": "edit", "path": "')


TEXTS = st.text(st.sampled_from("aA \n\u0301\u0345\u03b1\u212a\u1f82\uff21\U0001d400\u00e9é0."), max_size=60)


@given(TEXTS)
def test_it_never_exceeds_the_tokens(pocket, text):
    assert TokenBound(pocket[1]).tokens_of(text, FAR) <= len(pocket[1](text)["input_ids"])


@pytest.mark.parametrize("name", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
def test_normalizers_that_shrink_are_allowed_for(name):
    tokenizer = byte_level(normalizer=getattr(normalizers, name)())
    bound = TokenBound(tokenizer)
    assert bound.longest is not None
    for text in ("\u212a" * 40, "\U0001d400" * 40, "\u03b1\u0313\u0300\u0345" * 40, "e\u0301" * 40, "ﬃ" * 40):
        assert bound.tokens_of(text, FAR) <= len(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.Replace("  ", "")),
        byte_level(splitter=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])),
        byte_level(
            splitter=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
        ),
        fast(["a", "b", "<unk>"], unk_token="<unk>", fuse_unk=True),
        fast(sorted(ALPHABET)[:-1], splitter=pre_tokenizers.ByteLevel()),
    ],
    ids=["strips", "deletes", "drops spaces", "drops what splits", "one token for all unknown", "a byte is missing"],
)
def test_where_text_may_vanish_there_is_none(tokenizer):
    bound = TokenBound(tokenizer)
    assert bound.longest is None and bound.tokens_of("x" * 10**6, FAR) == 0


def test_a_token_that_takes_the_spaces_around_it_leaves_none():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<pad>", lstrip=True)])
    assert TokenBound(tokenizer).longest is None


def test_characters_count_where_bytes_are_a_way_out():
    tokenizer = fast([*BYTES, "a", "▁"], normalizer=normalizers.Replace(" ", "▁"), byte_fallback=True)
    bound = TokenBound(tokenizer)
    assert bound.unit == "characters" and bound.longest == len("<0x00>")
    assert bound.tokens_of("é" * 60, FAR) == 10 <= len(tokenizer("é" * 60)["input_ids"])


@pytest.mark.parametrize(
    "template, said, tokens",
    [
        # spaces at the ends may be stripped
        (PLAIN, ["x" * 30, "  " + "y" * 20 + "\n"], 50),
        (FORGETFUL, ["x" * 10**5, "short"], 5),
        # what a template adds counts where messages are many
        (PLAIN, [""] * (MANY_MESSAGES + 1), (MANY_MESSAGES + 1) * len("<user>")),
        (PLAIN, [""] * MANY_MESSAGES, 0),
        # what it refuses is somebody else's business
        ("{{ raise_exception('no') }}", ["x"], 0),
    ],
    ids=["all together", "left out", "many", "few", "refused"],
)
def test_messages_count_as_the_template_shows_them(template, said, tokens):
    bound = TokenBound(byte_level(template=template))
    assert bound.longest == 1 and bound.tokens_of([{"role": "user", "content": text} for text in said], FAR) == tokens
