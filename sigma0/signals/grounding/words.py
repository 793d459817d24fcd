"""Words of a text: how they are found, their stems, and those that carry no meaning."""

import re
from functools import lru_cache


def listed(words: str) -> list[str]:
    """Words written in a row."""
    return words.split()


# The standard library has no class of capitals; these are those of the alphabets below U+2000.
CAPITAL = f"[{''.join(chr(code) for code in range(0x2000) if chr(code).isupper())}]"
WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|[\u2019'-])+")
STOP = frozenset(
    listed(
        """
    a an the this that these those it its he his she they we you i her their our your my who which what when
    where why how is are was were be been being am do does did done has have had having will would shall
    should can could may might must and or but nor so yet for of in on at to from by with without as than
    then if because while although though since until about into over under after before between during
    through against not no yes very also only just more most some any all each every both few many much
    other another such same own too there here however therefore thus moreover furthermore meanwhile
    additionally overall together altogether combined finally first second third one two three
    it's he's she's that's there's let's according unlike like despite even instead still often use see
    call go make take get say usually sometimes always never
        """
    )
)
_ENDINGS = (("ies", "y"), ("sses", "ss"), ("ing", ""), ("ied", "y"), ("ed", ""), ("es", "e"), ("s", ""))


def words_of(text: str) -> list[str]:
    """Words of two letters and more, as written, in order."""
    return WORD.findall(text)


@lru_cache(maxsize=1 << 14)
def is_stop(word: str) -> bool:
    """Whether a word carries no meaning of its own."""
    return word.lower().replace("\u2019", "'") in STOP


@lru_cache(maxsize=1 << 14)
def stem(word: str) -> str:
    """A word without its commonest endings, lower case."""
    lowered = without_possessive(word.lower())
    for ending, instead in _ENDINGS:
        if lowered.endswith(ending) and len(lowered) - len(ending) >= 3 and not lowered.endswith("ss"):
            return (lowered[: -len(ending)] + instead).rstrip("e")
    return lowered.rstrip("e") if len(lowered) > 3 else lowered


def without_possessive(word: str) -> str:
    """A word without a final 's or apostrophe."""
    for ending in ("'s", "\u2019s", "'", "\u2019"):
        if word.endswith(ending):
            return word[: -len(ending)]
    return word
