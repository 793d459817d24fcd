"""What the shipped models say of themselves (`about.json`): the words of the world, and questions that they answer."""

from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import draw
from sigma0.checkpoints.about import About, Example, split_words

KNOWS = (
    "short stories of who went where, who holds what, whose child somebody is and how old people are, and answers "
    "questions about the story at hand; nothing else"
)
# of the test split: the story's number, and which of its questions
EXAMPLES = ((13, 1), (14, 1), (17, 0), (13, 0))
_SEED = 3
_QUESTIONS, _HARDEST = 4, 4
# every word of the world comes up long before
_SCENES = 1000


def about() -> About:
    """The same for all models of the micro-world."""
    items = [_example(*place) for place in EXAMPLES]
    examples = tuple(Example(prompt=item.prompt, answer=item.answer) for item in items)
    return About(knows=KNOWS, examples=examples, words=seen_words())


def seen_words() -> tuple[str, ...]:
    """All words and numbers of the training split, sorted."""
    words: set[str] = set()
    for index in range(_SCENES):
        scene = draw("train", 0, index)
        words.update(split_words(scene.story))
        for item in scene.items:
            words.update(split_words(f"{item.question} {item.answer}"))
    return tuple(sorted(words))


def _example(index: int, question: int) -> Item:
    return draw("test", _SEED, index, questions=_QUESTIONS, hardest=_HARDEST).items[question]
