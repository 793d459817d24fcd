"""What the shipped models say of themselves (`about.json`): the words of the world, and questions that they answer."""

from sigma0.bench.pocket.forms import TOKENS
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import LOOK_UPS, MIX, Mix, draw
from sigma0.checkpoints.about import About, Example, split_words
from sigma0.reason.forms import FORMS

KNOWS = (
    "short stories of who went where, who holds what, whose child somebody is and how old people are, and answers "
    "questions about the story at hand; nothing else"
)
KNOWS_LOOK_UPS = (
    "short stories of who went where, who holds what and whose child somebody is, and looks up where a thing is, who "
    "has it or which city a family comes from; no yes or no, no ages, nothing else"
)
KNOWS_FORMS = (
    "short stories of who went where, who holds what, whose child somebody is and how old people are; it answers "
    "questions about the story at hand, checks an answer with reasons, plans by look-ups, and takes them one by one"
)
# of the test split: the story's number, and which of its questions
EXAMPLES = ((13, 1), (14, 1), (17, 0), (13, 0))
# the same of stories that `LOOK_UPS` draws, of difficulty 1
LOOK_UP_EXAMPLES = ((4, 0), (1, 0), (6, 0), (2, 0))
_SEED = 3
_QUESTIONS, _HARDEST = 4, 4
# every word of the world comes up long before
_SCENES = 1000


def about(name: str = "pocket") -> About:
    """What a shipped model says: the same for all that were taught the whole world."""
    if name == "pocket-raven":
        items = [draw("test", _SEED, n, 1, _QUESTIONS, mix=LOOK_UPS).items[place] for n, place in LOOK_UP_EXAMPLES]
        knows, words = KNOWS_LOOK_UPS, seen_words(LOOK_UPS)
    else:
        items = [_example(*place) for place in EXAMPLES]
        knows, words = KNOWS, seen_words()
    examples = tuple(Example(prompt=item.prompt, answer=item.answer) for item in items)
    if name != "pocket-solver":
        return About(knows=knows, examples=examples, words=words)
    words = tuple(sorted({*words, *split_words(" ".join(TOKENS)), "told"}))
    return About(knows=KNOWS_FORMS, examples=examples, words=words, forms=FORMS)


def seen_words(mix: Mix = MIX) -> tuple[str, ...]:
    """All words and numbers of the training split, sorted."""
    words: set[str] = set()
    for index in range(_SCENES):
        scene = draw("train", 0, index, mix=mix)
        words.update(split_words(scene.story))
        for item in scene.items:
            words.update(split_words(f"{item.question} {item.answer}"))
    return tuple(sorted(words))


def _example(index: int, question: int) -> Item:
    return draw("test", _SEED, index, questions=_QUESTIONS, hardest=_HARDEST).items[question]
