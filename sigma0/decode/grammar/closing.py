"""What still closes an answer: as a token limit comes near, only ids are left after which its grammar can end in time.

llguidance says which ids may follow, not how far the end is. The shortest way to it is searched with copies of the
matcher, which cost a microsecond: at each place the token that closes most, else the longest. What is found is an upper
bound, and all of it depends on the ids so far and on the limit alone, so that a text does not depend on how it was
computed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
# Characters of a number at most, from which on it has to end where it can; those of a double have 24.
NUMBER = 24
# Tokens beyond the shortest way and what one token may add to it, from which on no limit is near, and that complete a
# character.
_SPARE = 8
# Tokens for the way to an end from any place of an ordinary answer.
_FAR = 128
# Ids that are tried one by one at a place, ids of all of their ways together, and samples of those of plain text.
_TRIED, _CHECKED, _SAMPLES = 256, 40_000, 16
# Masks that a search computes at most: for the shortest answer, for a way to an end where the first is too long, and
# beside a way.
_MASKS, _NEARER, _BESIDE = 4_000, 1_000, 48
# Ways to an end that are tried after an id, before one is searched.
_RESTS = 4
# Tokens of the longest way that is looked for.
_LONGEST = 1_024
_CLOSING, _NUMERIC, _DIGITS = frozenset(b'"}]'), frozenset(b"-+.0123456789eE"), frozenset(b"0123456789")
# What may stand outside of a string; where anything else may follow, a sequence is inside of one.
_OUTSIDE = frozenset(b'{}[]",:-+.0123456789eEtfn \n\r\t')


class Texts:
    """What the search has to know of a vocabulary.

    Args:
        tokens: The bytes of each id; b"" for one that is never allowed.
        eos: Ids that end an answer.

    Attributes:
        tokens: As given.
        eos: As given.
        plain: bool `[V]`, text that means the same wherever a string may go on.
        parts: bool `[V]`, parts of a character, which others have to complete.
        numeric: bool `[V]`, ids that may go on with a number.
    """

    def __init__(self, tokens: Sequence[bytes], eos: frozenset[int]) -> None:
        self.tokens, self.eos = tokens, eos
        sets = [frozenset(text) for text in tokens]
        lengths: Ids = np.array(list(map(len, tokens)), dtype=np.int64)
        self.parts = np.array([not is_whole(text) for text in tokens])
        plain = np.array([bool(item) and not item & {*_CLOSING, *b"\\"} and min(item) >= 32 for item in sets])
        self.plain = plain & ~self.parts
        self.numeric = np.array([text[:1] != b"" and text[0] in _NUMERIC for text in tokens])
        self._inside = np.array([text[:1] != b"" and text[0] not in _OUTSIDE for text in tokens])
        closes = np.array([bool(item) and item <= _CLOSING for item in sets])
        # of one length an object is closed first, then an array, then a string
        last = np.array([b'"]}'.find(text[-1:]) if text else 0 for text in tokens])
        digits = np.array([bool(item) and item <= _DIGITS for item in sets])
        opens = np.array([bool(item & {*b"{["}) for item in sets])
        rest = lengths - np.array([text.startswith((b"-", b"\\")) for text in tokens])
        # kinds of ids that may follow outside and inside of a string, in the order in which they lead to an end, each
        # with a rank of which the greatest is tried first: a number is as short as it can be, all else as long
        outside = [(closes, 4 * lengths + last), (~self.numeric & ~opens & (lengths > 0), lengths), (digits, -lengths)]
        quotes = closes & np.array([text[:1] == b'"' for text in tokens])
        self._kinds = [
            [(bits_of(kind), rank) for kind, rank in kinds]
            for kinds in (outside, [(quotes, 4 * lengths + last)])
        ]  # fmt: skip
        self._any, self._inside_bits = rest, bits_of(self._inside)

    def first(self, bits: Bits) -> int:
        """The id of a mask that is tried first; -1 where there is none."""
        kinds = self._kinds[int((bits & self._inside_bits).any())]
        for kind, rank in kinds:
            of_kind = bits & kind
            if of_kind.any():
                ids = ids_of(of_kind)
                return int(ids[np.argmax(rank[ids])])
        ids = ids_of(bits)
        return int(ids[np.argmax(self._any[ids])]) if len(ids) else -1

    def is_text(self, allowed: Ids) -> bool:
        """Whether a sequence after which these may follow is inside of a string."""
        return bool(self._inside[allowed].any())

    def ends_number(self, token_ids: Sequence[int]) -> bool:
        """Whether ids end in as many characters as a number may have."""
        length = 0
        for item in reversed(token_ids):
            text = self.tokens[item]
            rest = text.rstrip(bytes(_NUMERIC))
            length += len(text) - len(rest)
            if rest or not text or length >= NUMBER:
                break
        return length >= NUMBER


def is_whole(text: bytes) -> bool:
    """Whether bytes are a text of whole characters."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def ids_of(bits: Bits) -> Ids:
    """The ids of a mask int32 `[ceil(V / 32)]`, ascending."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def bits_of(allowed: npt.NDArray[np.bool_]) -> Bits:
    """The mask int32 `[ceil(V / 32)]` of bool `[V]`."""
    packed = np.packbits(allowed, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view(np.int32)


def least_answer(matcher: Any, texts: Texts, most: int = _LONGEST, masks: int = _MASKS) -> list[int] | None:
    """A short whole answer of at most `most` tokens from where a matcher stands; None where none was found.

    At each place the ways of all ids that lead somewhere else are compared, as far as `masks` of them allow.

    Raises:
        ValueError: Where an id that ends an answer has to stand inside of it, or the engine gives up on the way.
    """
    search = _Search(texts, _LONGEST)
    try:
        best = search.way(matcher, _LONGEST, strict=True)
    except ValueError:
        near = _Search(texts, masks).nearest_end(matcher, most)
        if near is None:
            raise
        return near
    search = _Search(texts, masks)
    if best is None:
        return search.nearest_end(matcher, most)
    place, way = matcher.deep_copy(), list[int]()
    while not place.is_accepting() and search.left > 0:
        branches = list(search.branches(place))
        for item in branches if len(branches) > 1 else ():
            branch = place.deep_copy()
            branch.consume_token(item)
            rest = search.way(branch, len(best) - len(way) - 2)
            if rest is not None:
                best = [*way, item, *rest]
        way.append(best[len(way)])
        place.consume_token(way[-1])
    return best if len(best) <= most else None


def closing_way(matcher: Any, texts: Texts, left: int) -> list[int] | None:
    """A way to an end of at most `left` tokens; None where none was found."""
    way = _Search(texts, _LONGEST).way(matcher, left)
    return least_answer(matcher, texts, left, _NEARER) if way is None else way


def leads_to_end(matcher: Any, texts: Texts, way: Sequence[int]) -> bool:
    """Whether an answer may go on with these ids and end."""
    ids = [*way, min(texts.eos)]
    return bool(matcher.validate_tokens(ids) == len(ids))


def closing_mask(matcher: Any, texts: Texts, bits: Bits, left: int, reach: int, way: Sequence[int]) -> Bits:
    """The ids of a mask after which an answer can still end within its limit; all of them where that is far.

    Args:
        matcher: llguidance's, where the sequence stands.
        texts: Of the vocabulary.
        bits: What may follow, int32 `[ceil(V / 32)]`.
        left: Tokens that the answer may still have.
        reach: Tokens that one token may add to the shortest way.
        way: From there to an end, of at most `left` tokens.
    """
    if len(way) + reach + _SPARE < left:
        return bits
    search, allowed = _Search(texts, _BESIDE, [list(way), list(way[1:])]), ids_of(bits)
    kept = np.zeros(len(texts.tokens), dtype=np.bool_)
    is_part, is_plain = texts.parts[allowed], texts.plain[allowed]
    kept[allowed[is_part]] = len(way) + _SPARE < left
    tried = min(_TRIED, _CHECKED // (len(way) + 1))
    single, plain = allowed[~is_part], allowed[is_plain]
    if len(single) > tried and len(plain):
        single = allowed[~is_part & ~is_plain]
        samples = plain[np.linspace(0, len(plain) - 1, _SAMPLES).astype(np.int64)].tolist()
        longest = max(plain.tolist(), key=lambda item: len(texts.tokens[item]))
        kept[plain] = all(search.fits(matcher, item, left) for item in {*samples, longest})
    for item in single[:tried].tolist():
        kept[item] = item in texts.eos or search.fits(matcher, item, left)
    if way:
        kept[way[0]] = True
    return bits_of(kept) if kept.any() else bits


def is_near(left: int, reach: int) -> bool:
    """Whether a limit of tokens may be so near that a mask has to be looked at."""
    return left <= 4 * (reach + _FAR)


def ending_number(texts: Texts, bits: Bits) -> Bits:
    """The ids of a mask that end a number which is long enough; all of them where it cannot end, or is text."""
    allowed = ids_of(bits)
    others = allowed[~texts.numeric[allowed]]
    if not len(others) or texts.is_text(others):
        return bits
    kept = np.zeros(len(texts.tokens), dtype=np.bool_)
    kept[others] = True
    return bits_of(kept)


class _Search:
    """A search for ends, which computes a number of masks at most.

    Args:
        texts: Of the vocabulary.
        left: Masks.
        rests: Ways to an end that may follow an id, of which what is found becomes one.
    """

    def __init__(self, texts: Texts, left: int, rests: Sequence[list[int]] = ()) -> None:
        self._texts, self.left, self._rests = texts, left, list(rests)

    def _mask(self, place: Any) -> Bits:
        self.left -= 1
        # the engine's may have a word more
        return np.frombuffer(place.compute_bitmask(), dtype=np.int32)[: -(-len(self._texts.tokens) // 32)]

    def way(self, matcher: Any, most: int, strict: bool = False) -> list[int] | None:
        """Ids of at most `most` tokens to an end; None where they do not lead there, or masks are used up."""
        place, way = matcher.deep_copy(), list[int]()
        while not place.is_accepting():
            if len(way) >= most or self.left <= 0:
                return None
            best = self._texts.first(self._mask(place))
            if strict and place.is_error():
                raise ValueError(place.get_error())
            if best < 0:
                return None
            if best in self._texts.eos:
                if strict:
                    raise ValueError("a token that ends an answer has to stand inside of it")
                return None
            place.consume_token(best)
            way.append(best)
        return way

    def nearest_end(self, matcher: Any, most: int) -> list[int] | None:
        """The ids to an end that is few places away, of at most `most` tokens: where what is tried first never ends."""
        places = [(matcher.deep_copy(), list[int]())]
        for place, way in places:
            if place.is_accepting():
                return way
            for item in self.branches(place) if len(way) < most and self.left > 0 else ():
                branch = place.deep_copy()
                branch.consume_token(item)
                places.append((branch, [*way, item]))
        return None

    def branches(self, place: Any) -> Iterator[int]:
        """Ids that may follow, one of those that are followed by the same."""
        bits = self._mask(place).copy()
        seen: set[tuple[bytes, bytes]] = set()
        for _ in range(_TRIED):
            item = self._texts.first(bits) if self.left > 0 else -1
            if item < 0:
                return
            bits[item // 32] &= ~np.uint32(1 << item % 32).astype(np.int32)
            branch = place.deep_copy()
            if item not in self._texts.eos and branch.consume_token(item):
                next_mask = self._mask(branch).tobytes(), bytes(branch.compute_ff_bytes())
                if next_mask not in seen:
                    seen.add(next_mask)
                    yield item

    def fits(self, matcher: Any, token_id: int, left: int) -> bool:
        """Whether an answer can end within `left` tokens of which this is the first."""
        for place, known in enumerate(self._rests):
            if len(known) < left and leads_to_end(matcher, self._texts, [token_id, *known]):
                # most of what may follow at a place ends the same way
                self._rests.insert(0, self._rests.pop(place))
                return True
        branch = matcher.deep_copy()
        rest = self.way(branch, left - 1) if branch.consume_token(token_id) else None
        if rest is not None:
            self._rests = [rest, *self._rests[: _RESTS - 1]]
        return rest is not None
