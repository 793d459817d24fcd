"""Warm-up rows: short notes of who is where, told again and again, so that one look-up is practised at every note.

A model that starts on stories and questions stays for long on a plateau where it names any place of the story. A note
that repeats what an earlier one said can be completed only by looking it up, and a row holds a dozen of them. The
notes grow from two words to the sentences of the stories, so the name moves away from the place step by step.
"""

from random import Random

from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Encoded
from sigma0.bench.pocket.moves import NAMES, PLACES, THINGS

# Rows of the first two kinds grow from two words to sentences; {who} is a person, {what} a place or a thing.
PLACE_FORMS: tuple[str, ...] = (" {who} {what}", " {who} the {what}", " {who} in the {what}.")
PLACE_FORMS += (" {who} is in the {what}.", " {who} went to the {what}.")
THING_FORMS: tuple[str, ...] = (
    " {who} {what}",
    " {who} has the {what}.",
    " What does {who} have? {who} has the {what}.",
)
THING_FORMS += (" {who} took the {what}.", " {who} picked up the {what}.")
# In the third kind everyone has a place and a thing, so only forms that tell which is meant can be used.
_UNCLEAR = 3, 1
LENGTH = 90
_PEOPLE = (2, 3, 4, 5)


def note_row(tokenizer: PreTrainedTokenizerFast, seed: int, index: int) -> Encoded:
    """Make row `index`: notes about two to five people, each always at one place, with one thing, or both.

    Rows take turns at the kind and at how many forms they use. The word a note ends in is marked as an answer
    wherever the same fact was told before.
    """
    rng = Random(f"notes/{seed}/{index}")
    count = rng.choice(_PEOPLE)
    people, places, things = (rng.sample(words, count) for words in (NAMES, PLACES, THINGS))
    kind, forms = index % 3, 1 + index // 3 % 5
    choices = [(PLACE_FORMS[:forms], places), (THING_FORMS[:forms], things)][kind : kind + 1]
    if kind == 2:
        choices = [(PLACE_FORMS[_UNCLEAR[0] :], places), (THING_FORMS[_UNCLEAR[1] :], things)]
    ids: list[int] = []
    marks: list[bool] = []
    told: set[str] = set()
    while len(ids) < LENGTH:
        who = rng.randrange(count)
        used, words = rng.choice(choices)
        note = rng.choice(used).format(who=people[who], what=words[who])
        tokens = tokenizer.backend_tokenizer.encode(note, add_special_tokens=False).ids
        last = len(tokens) - 1 - note.endswith(".")
        ids += tokens
        marks += [position == last and words[who] in told for position in range(len(tokens))]
        told.add(words[who])
    return Encoded(ids, marks)
