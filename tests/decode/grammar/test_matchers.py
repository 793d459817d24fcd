"""Where sequences stand in their grammars: matchers, their masks, and the lanes that these lie with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.exits import ExitRule
from sigma0.decode.grammar.closing import Texts
from sigma0.decode.grammar.compiled import CompiledGrammar, GrammarError, Grammars, Matcher, _one_line
from sigma0.decode.grammar.rows import GrammarRows, may_force, only_id, start_masks
from sigma0.decode.grammar.spec import Choice, Grammar, JsonObject, JsonSchema, Regex
from sigma0.decode.lanes import Lanes
from sigma0.decode.logits import BROKEN
from sigma0.decode.step import ENDS, FED, FED_POSITION, LINE_WIDTH, SEQUENCE, TOKEN
from tests.byte_model import END
from tests.decode.grammar.matching import TOKENIZER, VOCABULARY, check_texts, refused

SIZE = 260


def ids(text):
    return TOKENIZER(text)["input_ids"]


def allowed(bits):
    return set(np.flatnonzero(np.unpackbits(np.asarray(bits).view(np.uint8), bitorder="little")).tolist())


def letters(text):
    return {item for letter in text for item in ids(letter)}


AB = VOCABULARY.compile(Regex("ab(c|d)e"))


def test_a_matcher_takes_ids_and_takes_them_back():
    matcher = AB.matcher()
    assert allowed(matcher.mask()) == letters("a") and matcher.count == 0
    for item in ids("abd"):
        matcher.take(item)
    assert matcher.count == 3 and allowed(matcher.mask()) == letters("e")
    matcher.back_to(3)
    matcher.back_to(2)
    assert matcher.count == 2 and allowed(matcher.mask()) == letters("cd")
    for count in (3, -1):
        with pytest.raises(AssertionError):
            matcher.back_to(count)
    with refused("leave no id"):
        matcher.take(ids("a")[0])
    with refused("leave no id"):
        matcher.check(END)
    assert matcher.count == 2
    matcher.take(ids("c")[0])
    matcher.take(ids("e")[0])
    matcher.check(END)
    assert allowed(matcher.mask()) == {END}
    matcher.back_to(0)
    assert allowed(matcher.mask()) == letters("a") and AB.matcher().count == 0


class Engine:
    """Stands for llguidance's matcher: it allows these words, and fails where it is told to."""

    def __init__(self, words, error=False, goes=True):
        self.words, self.error, self.goes = words, error, goes

    def compute_bitmask(self):
        return np.array(self.words, dtype=np.int32).tobytes()

    def is_error(self):
        return self.error

    def get_error(self):
        return "it is\n  ^^^\n  broken | here\n"

    def validate_tokens(self, tokens):
        return 1

    def consume_token(self, token):
        return self.goes

    def rollback(self, count):
        return self.goes


def matcher_of(size, *words, **state):
    return Matcher(Engine(words, **state), CompiledGrammar(None, Texts([b"x"] * size, frozenset())))


@pytest.mark.parametrize("size, words", [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_a_mask_has_a_bit_for_each_id(size, words):
    read = matcher_of(size, 5, 6).mask()
    assert read.tolist() == [5, 6, 0][:words] and read.dtype == np.int32


def test_what_an_engine_reports_is_told_in_a_line():
    with pytest.raises(GrammarError, match="cannot go on: it is"):
        matcher_of(32, 5, error=True).mask()
    with pytest.raises(GrammarError, match="no token of this model's vocabulary fits here"):
        matcher_of(32, 0).mask()
    with pytest.raises(GrammarError, match="cannot go on: it is"):
        matcher_of(32, 5, goes=False).take(3)
    matcher = matcher_of(32, 5)
    matcher.take(3)
    matcher._matcher.goes = False
    with pytest.raises(GrammarError, match=r"cannot go back: it is; broken \| here$"):
        matcher.back_to(0)
    assert matcher.count == 1
    assert _one_line(" a \n\n ^~~ | ^\n b") == "a; b" and len(_one_line("x" * 500)) == 400


def test_specs_are_followed_as_they_are_written():
    check_texts(JsonObject(), ["{}", '{"a": [1, {"b": null}]}'], ["", "[]", '{"a":1}', "{} "])
    check_texts(JsonSchema.of(True), ["1", '"a"', "[1, 2]", '{"a": 1}'], ["", "[1,2]"])
    check_texts(JsonSchema.of({"type": "array", "items": {"const": 1}}), ["[]", "[1, 1]"], ["[1,1]", "[ 1]", "1"])
    unique = {"type": "array", "uniqueItems": True}
    check_texts(JsonSchema.of(unique, strict=False), ["[1, 1]"], ["{}"])
    with refused("schema cannot be followed: .*uniqueItems"):
        VOCABULARY.compile(JsonSchema.of(unique))
    check_texts(Choice(("é", 'a"b')), ["é", 'a"b'], ["e", "a"])
    check_texts(Grammar('root ::= "a" "b"?'), ["a", "ab"], ["b", ""])
    with refused("grammar cannot be followed"):
        VOCABULARY.compile(Grammar("start: ("))
    with refused("regex cannot be followed"):
        VOCABULARY.compile(Regex("(?=a)b"))


@pytest.mark.parametrize(
    "words, only",
    [
        ([0, 0], -1), ([1, 0], 0), ([2, 0], 1), ([0, 1], 32), ([0, 4], 34), ([-(2**31), 0], 31), ([0, -(2**31)], 63),
        ([3, 0], -1), ([1, 1], -1), ([-1, 0], -1), ([2**30, 0], 30), ([5, 0], -1), ([0, -(2**31) + 1], -1),
        ([0] * 8 + [8], 259),
    ],
)  # fmt: skip
def test_the_only_id_that_a_mask_allows(words, only):
    assert only_id(np.array(words, dtype=np.int32)) == only


def test_first_masks_of_a_batch():
    masks = start_masks(Grammars((None, AB)), SIZE, torch.device("cpu"))
    assert masks.dtype == torch.int32 and masks[0].tolist() == [-1] * 9 and allowed(masks[1].numpy()) == letters("a")
    assert start_masks(Grammars((None,)), 32, torch.device("cpu")).tolist() == [[-1]]
    assert start_masks(Grammars((None,)), 33, torch.device("cpu")).tolist() == [[-1, -1]]


@pytest.mark.parametrize("after, whole", [("finish", False), ("verify", True), ("drop", False)])
def test_ids_are_fed_unread_where_their_deeper_loops_run_all_the_same(after, whole):
    plain, coda = SimpleNamespace(stages=(1, 0)), SimpleNamespace(stages=(0, 1))
    for config, runs in (({}, True), ({"mode": "fixed", "depth": 2}, whole), ({"mode": "fixed", "depth": 4}, True)):
        config = ExitConfig(**config, after_exit=after)
        rule = ExitRule(config, 4)
        assert may_force(plain, rule, config) == (runs and after != "drop")
        assert not may_force(coda, rule, config)


DEPTH, FIRST = 3, 4


def line(sequence, token_id, fed_at, ends=0, fresh=1):
    made = [0] * LINE_WIDTH
    made[SEQUENCE], made[TOKEN], made[FED_POSITION], made[ENDS], made[FED] = sequence, token_id, fed_at, ends, fresh
    return made


@pytest.fixture
def rows():
    made = GrammarRows(Lanes(2, DEPTH, torch.zeros(0, 1)), SIZE)
    assert not made
    made.set(1, AB, FIRST, forces=True, limit=None)
    return made


def lanes_of(rows):
    """What the lanes of sequence 1 allow, None for everything, and the one id that is fed unread."""
    lanes = rows._lanes
    masks = [None if (bits == -1).all() else allowed(bits.numpy()) for bits in lanes.masks[DEPTH : 2 * DEPTH]]
    return masks, lanes.only[DEPTH : 2 * DEPTH].tolist()


def test_masks_lie_with_the_lanes_of_their_tokens(rows):
    assert rows and lanes_of(rows) == ([None] * 3, [-1] * 3)
    # the last prompt token is always read: position 3 in lane 0
    rows.start(1)
    rows.start(0)
    assert lanes_of(rows) == ([letters("a"), None, None], [-1, -1, -1])
    a, b, c, d, e = (ids(letter)[0] for letter in "abcde")
    assert rows.advance([line(1, a, 4), line(0, 7, 4), line(1, b, 5)]) == {}
    assert lanes_of(rows) == ([letters("a"), letters("b"), letters("cd")], [-1, b, -1])
    assert rows.advance([line(1, c, 6)]) == {} and lanes_of(rows)[0][0] == letters("e")
    # a draft that fell: its id is taken back
    assert rows.advance([line(1, d, 6), line(1, e, 7)]) == {}
    assert lanes_of(rows) == ([letters("e"), {END}, letters("cd")], [e, END, -1])
    assert rows.advance([line(1, END, 8, ends=1)]) == {}
    assert (rows._lanes.masks[:DEPTH] == -1).all() and (rows._lanes.masks[-1] == -1).all()


def test_lines_that_feed_nothing_are_passed_over(rows):
    a = ids("a")[0]
    assert rows.advance([line(1, 300, 4, fresh=0), line(1, BROKEN, 4), line(1, a, 4)]) == {}
    assert lanes_of(rows)[0][1] == letters("b")


def test_what_breaks_is_told_by_sequence(rows):
    rows.set(0, AB, FIRST, forces=False, limit=None)
    a, b = ids("a")[0], ids("b")[0]
    errors = rows.advance([line(0, b, 4), line(1, a, 4)])
    assert list(errors) == [0] and isinstance(errors[0], GrammarError) and lanes_of(rows)[0][1] == letters("b")
    assert list(rows.advance([line(1, END, 5, ends=1)])) == [1]


def test_ids_are_read_where_none_may_be_forced(rows):
    rows.set(1, AB, FIRST, forces=False, limit=None)
    rows.advance([line(1, ids("a")[0], 4)])
    assert lanes_of(rows) == ([None, letters("b"), None], [-1, -1, -1])


def test_tokens_that_are_put_back_in_flight_get_their_masks(rows):
    rows.restore(1, ids("abc"), [5, 6])
    assert lanes_of(rows) == ([letters("e"), None, letters("cd")], [ids("e")[0], -1, -1])
    rows.restore(1, ids("a"), [3, 4])
    assert lanes_of(rows)[0][:2] == [letters("a"), letters("b")] and lanes_of(rows)[1][0] == -1
    rows.set(1, AB, FIRST, forces=True, limit=None)
    rows.restore(1, ids("a"), [4])
    assert lanes_of(rows) == ([None, letters("b"), None], [-1, ids("b")[0], -1])
    rows.restore(0, ids("a"), [3])
    assert (rows._lanes.masks[:DEPTH] == -1).all()


def test_a_sequence_that_is_forgotten_allows_everything(rows):
    rows.advance([line(1, ids("a")[0], 4)])
    rows.clear(0)
    assert rows and lanes_of(rows)[0][1] == letters("b")
    rows.clear(1)
    assert not rows and lanes_of(rows) == ([None] * 3, [-1] * 3)
    assert rows.advance([line(1, 300, 4)]) == {}


def test_grammars_of_a_batch_force_by_default():
    assert Grammars((None, AB)).forces and isinstance(AB, CompiledGrammar)
