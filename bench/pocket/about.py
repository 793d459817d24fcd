"""What the shipped models say of themselves (`about.json`): the words of the world, and questions that they answer."""

from sigma0.bench.pocket.forms import TOKENS
from sigma0.bench.pocket.world import LOOK_UPS, MIX, draw
from sigma0.checkpoints.about import About, Example, split_words
from sigma0.reason.forms import FORMS

_STORIES = "short stories of who went where, who holds what"
KNOWS = {
    "pocket": (
        f"{_STORIES}, whose child somebody is and how old people are, and answers questions about the story at hand; "
        "nothing else"
    ),
    "pocket-raven": (
        f"{_STORIES} and whose child somebody is, and looks up where a thing is, who has it or which city a family "
        "comes from; no yes or no, no ages, nothing else"
    ),
    "pocket-solver": (
        f"{_STORIES}, whose child somebody is and how old people are; it answers questions about the story at hand, "
        "checks an answer with reasons, plans by look-ups, and takes them one by one"
    ),
}
# of the test split: the story's number, and which of its questions
EXAMPLES = ((13, 1), (14, 1), (17, 0), (13, 0))
# the same of stories that `LOOK_UPS` draws, of difficulty 1
LOOK_UP_EXAMPLES = ((4, 0), (1, 0), (6, 0), (2, 0))
_SEED, _QUESTIONS, _HARDEST = 3, 4, 4
# every word of the world comes up long before
_SCENES = 1000


def about(name: str = "pocket") -> About:
    """What a shipped model says: the same for all that were taught the whole world."""
    look_ups = name == "pocket-raven"
    mix, places = (LOOK_UPS, LOOK_UP_EXAMPLES) if look_ups else (MIX, EXAMPLES)
    examples = []
    for index, question in places:
        scene = draw("test", _SEED, index, 1 if look_ups else None, _QUESTIONS, _HARDEST, mix)
        examples.append(Example(prompt=scene.items[question].prompt, answer=scene.items[question].answer))
    words: set[str] = set()
    for index in range(_SCENES):
        scene = draw("train", 0, index, mix=mix)
        words.update(split_words(" ".join([scene.story, *(f"{item.question} {item.answer}" for item in scene.items)])))
    if name == "pocket-solver":
        words |= {*split_words(" ".join(TOKENS)), "told"}
    return About(
        knows=KNOWS.get(name, KNOWS["pocket"]),
        examples=tuple(examples),
        words=tuple(sorted(words)),
        forms=FORMS if name == "pocket-solver" else (),
    )
