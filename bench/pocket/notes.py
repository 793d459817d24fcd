"""Warm-up rows: short notes that say the same few facts again and again, so that each one practises one look-up.

A model that starts on stories and questions stays for long on a plateau where it names any place of the story. A note
that repeats what an earlier one said can be completed only by looking it up, and a row holds a dozen of them. Each kind
of note has a ladder of forms, from two words to the sentences of the stories: what is told moves away from whom it is
told of, step by step.
"""

from random import Random

from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import NONE, Encoded, word_id
from sigma0.bench.pocket.stories import CITIES, NAMES, OLDEST, PLACES, THINGS, YOUNGEST

_AGES = tuple(str(age) for age in range(YOUNGEST, OLDEST + 1))
# Sources, goals, ladder of forms.
KINDS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        NAMES,
        PLACES,
        (" {x} {y}", " {x} the {y}", " {x} in the {y}.", " {x} is in the {y}.", " {x} went to the {y}."),
    ),
    (THINGS, NAMES, (" {x} {y}", " {x} with {y}", " the {x} with {y}.", " The {x} is with {y}.")),
    (
        THINGS,
        THINGS,
        (" {x} {y}.", " {x} the {y}.", " {x} in the {y}.", " The {x} is in the {y}.", " The {x} was put into the {y}."),
    ),
    (NAMES, NAMES, (" {x} {y}.", " {x} of {y}.", " {x} child of {y}.", " {x} is a child of {y}.")),
    (NAMES, CITIES, (" {x} {y}", " {x} from {y}.", " {x} comes from {y}.", " The family of {x} comes from {y}.")),
    (NAMES, _AGES, (" {x} {y}", " {x} is {y}", " {x} is {y} years old.")),
)
LENGTH = 90
_PEOPLE = (2, 3, 4, 5)


def note_row(tokenizer: PreTrainedTokenizerFast, seed: int, index: int) -> Encoded:
    """Make row `index`: notes about two to five people or things, all of one kind.

    Rows take turns at the kind and at how many rungs of its ladder they use. The word a note tells is marked as an
    answer wherever the same fact was told before.
    """
    rng = Random(f"notes/{seed}/{index}")
    sources, goals, ladder = KINDS[index % len(KINDS)]
    forms = ladder[: rng.randint(1, len(ladder))]
    count = rng.choice(_PEOPLE)
    who = rng.sample(sources, count)
    what = rng.sample([goal for goal in goals if goal not in who], count)
    ids: list[int] = []
    marks: list[bool] = []
    about: list[int] = []
    told: set[str] = set()
    while len(ids) < LENGTH:
        place = rng.randrange(count)
        source, goal = who[place], what[place]
        note = rng.choice(forms).format(x=source, y=goal)
        encoding = tokenizer.backend_tokenizer.encode(note, add_special_tokens=False)
        start = note.rindex(f" {goal}") + 1
        marks += [source in told and begin <= start < end for begin, end in encoding.offsets]
        first = word_id(tokenizer, source)
        began = note.index(f" {source}")
        about += [first if end > began + 1 else NONE for _, end in encoding.offsets]
        ids += encoding.ids
        told.add(source)
    ways: list[tuple[int, ...]] = [
        (subject, token) for subject, token, mark in zip(about, ids, marks, strict=True) if mark
    ]
    return Encoded(ids, marks, ways, about)
