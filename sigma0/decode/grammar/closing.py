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
# Ids that are tried one by one at a place; of more, those of plain text are tried by samples.
_TRIED, _SAMPLES = 256, 16
# Masks that a search for the shortest answer computes at most, places that it looks at where the first way has no end,
# and tokens of the longest answer that is looked for.
_MASKS, _PLACES, _LONGEST = 4_000, 500, 4_096
_CLOSING, _NUMERIC = frozenset(b'"}]'), frozenset(b"-+.0123456789eE")
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
        inside: bool `[V]`, ids that may follow in a string alone.
        plain: bool `[V]`, text that means the same wherever a string may go on.
        parts: bool `[V]`, parts of a character, which others have to complete.
        numeric: bool `[V]`, ids that may go on with a number.
    """

    def __init__(self, tokens: Sequence[bytes], eos: frozenset[int]) -> None:
        self.tokens, self.eos = tokens, eos
        self.inside = np.array([bool(text) and text[0] not in _OUTSIDE for text in tokens])
        # of ids that may follow outside and inside of a string, the greatest is tried first
        closes = [set(text) <= _CLOSING for text in tokens]
        inside = [each and text[:1] == b'"' for each, text in zip(closes, tokens, strict=True)]
        self._preference = _preferences(tokens, closes), _preferences(tokens, inside)
        self.parts = np.array([not _is_whole(text) for text in tokens])
        plain = np.array([bool(text) and not _CLOSING & {*text, *b"\\"} and min(text) >= 32 for text in tokens])
        self.plain = plain & ~self.parts
        self.numeric = np.array([bool(text) and text[0] in _NUMERIC for text in tokens])

    def preference(self, allowed: Ids) -> Ids:
        """Of some ids, of which that with the greatest is tried first: what closes most, else the longest."""
        return self._preference[int(self.inside[allowed].any())][allowed]

    def ends_number(self, token_ids: Sequence[int]) -> bool:
        """Whether ids end in as many characters as a number may have."""
        length = 0
        for each in reversed(token_ids):
            text = self.tokens[each]
            rest = text.rstrip(bytes(_NUMERIC))
            length += len(text) - len(rest)
            if rest or not text or length >= NUMBER:
                break
        return length >= NUMBER


def _is_whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _preferences(tokens: Sequence[bytes], closes: Sequence[bool]) -> Ids:
    # of one length an object is closed first, then an array, then a string; a sign or an escape leads to nothing short
    each = (
        2**32 + 4 * len(text) + b'"]}'.index(text[-1])
        if text and closing
        else len(text) - text.startswith((b"-", b"\\"))
        for text, closing in zip(tokens, closes, strict=True)
    )
    return np.fromiter(each, dtype=np.int64, count=len(tokens))


def ids_of(bits: Bits) -> Ids:
    """The ids of a mask int32 `[ceil(V / 32)]`, ascending."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def bits_of(allowed: npt.NDArray[np.bool_]) -> Bits:
    """The mask int32 `[ceil(V / 32)]` of bool `[V]`."""
    packed = np.packbits(allowed, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view(np.int32)


def least_answer(matcher: Any, texts: Texts, most: int = _LONGEST) -> list[int] | None:
    """A short whole answer of at most `most` tokens from where a matcher stands; None where none was found.

    At each place the ways of all ids that lead somewhere else are compared, as far as a number of masks allows.

    Raises:
        ValueError: Where an id that ends an answer has to stand inside of it, or the engine gives up on the way.
    """
    try:
        best = _way(matcher, texts, _LONGEST, strict=True)
    except ValueError:
        near = _nearest_end(matcher, texts, most)
        if near is None:
            raise
        return near
    if best is None:
        return _nearest_end(matcher, texts, most)
    place, way, left = matcher.deep_copy(), list[int](), _MASKS
    while not place.is_accepting() and left > 0:
        branches = list(_branches(place, texts))
        left -= len(branches)
        for each in branches if len(branches) > 1 else ():
            branch = place.deep_copy()
            branch.consume_token(each)
            rest = _way(branch, texts, len(best) - len(way) - 2)
            left -= len(best) - len(way)
            if rest is not None:
                best = [*way, each, *rest]
        way.append(best[len(way)])
        place.consume_token(way[-1])
    return best if len(best) <= most else None


def closing_mask(matcher: Any, texts: Texts, bits: Bits, left: int, reach: int) -> Bits:
    """The ids of a mask after which an answer can still end within its limit; all of them where that is far.

    Args:
        matcher: llguidance's, where the sequence stands.
        texts: Of the vocabulary.
        bits: What may follow, int32 `[ceil(V / 32)]`.
        left: Tokens that the answer may still have.
        reach: Tokens that one token may add to the shortest way.
    """
    if left > 4 * (reach + _FAR):
        return bits
    way = _way(matcher, texts, left)
    if way is None:
        way = least_answer(matcher, texts, left)
    if way is None or len(way) + reach + _SPARE < left:
        return bits
    allowed = ids_of(bits)
    kept = np.zeros(len(texts.tokens), dtype=np.bool_)
    is_part, is_plain = texts.parts[allowed], texts.plain[allowed]
    kept[allowed[is_part]] = len(way) + _SPARE < left
    single, plain = allowed[~is_part], allowed[is_plain]
    if len(single) > _TRIED and len(plain):
        single = allowed[~is_part & ~is_plain][:_TRIED]
        samples = plain[np.linspace(0, len(plain) - 1, _SAMPLES).astype(np.int64)]
        longest = plain[np.argmax(texts.preference(plain))]
        kept[plain] = all(_fits(matcher, texts, each, way, left) for each in {*samples.tolist(), int(longest)})
    for each in single.tolist():
        kept[each] = each in texts.eos or _fits(matcher, texts, each, way, left)
    if way:
        kept[way[0]] = True
    return bits_of(kept) if kept.any() else bits


def ending_number(texts: Texts, bits: Bits) -> Bits:
    """The ids of a mask that end a number which is long enough; all of them where it cannot end, or is text."""
    allowed = ids_of(bits)
    others = allowed[~texts.numeric[allowed]]
    if not len(others) or texts.inside[others].any():
        return bits
    kept = np.zeros(len(texts.tokens), dtype=np.bool_)
    kept[others] = True
    return bits_of(kept)


def _way(matcher: Any, texts: Texts, most: int, strict: bool = False) -> list[int] | None:
    """Ids of at most `most` tokens to an end."""
    place, way = matcher.deep_copy(), list[int]()
    while not place.is_accepting():
        allowed = ids_of(np.frombuffer(place.compute_bitmask(), dtype=np.int32))
        if strict and place.is_error():
            raise ValueError(place.get_error())
        if len(way) >= most or not len(allowed):
            return None
        best = int(allowed[np.argmax(texts.preference(allowed))])
        if best in texts.eos:
            if strict:
                raise ValueError("a token that ends an answer has to stand inside of it")
            return None
        place.consume_token(best)
        way.append(best)
    return way


def _nearest_end(matcher: Any, texts: Texts, most: int) -> list[int] | None:
    """The ids to an end that is few places away, of at most `most` tokens: where what is longest never ends."""
    places = [(matcher.deep_copy(), list[int]())]
    for place, way in places:
        if place.is_accepting():
            return way
        for each in _branches(place, texts) if len(way) < most and len(places) < _PLACES else ():
            branch = place.deep_copy()
            branch.consume_token(each)
            places.append((branch, [*way, each]))
    return None


def _branches(place: Any, texts: Texts) -> Iterator[int]:
    """Ids that may follow, one of those that lead to equal masks."""
    allowed = ids_of(np.frombuffer(place.compute_bitmask(), dtype=np.int32))
    order = np.argsort(-texts.preference(allowed), kind="stable")[:_TRIED]
    seen: set[bytes] = set()
    for each in allowed[order].tolist():
        branch = place.deep_copy()
        if each not in texts.eos and branch.consume_token(each):
            mask = branch.compute_bitmask()
            if mask not in seen:
                seen.add(mask)
                yield each


def _fits(matcher: Any, texts: Texts, token_id: int, way: Sequence[int], left: int) -> bool:
    """Whether an answer can end within `left` tokens of which this is the first."""
    ids = [token_id, *way, min(texts.eos)]
    if len(way) < left and matcher.validate_tokens(ids) == len(ids):
        return True
    branch = matcher.deep_copy()
    return bool(branch.consume_token(token_id)) and _way(branch, texts, left - 1) is not None
