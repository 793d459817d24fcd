"""From scenes and warm-up notes to training batches: token ids and the weight each next token has in the loss."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.items import Item, Scene
from sigma0.bench.pocket.stories import CITIES, ENTITIES, NAMES, OLDEST, PLACES, THINGS, YOUNGEST
from sigma0.bench.pocket.tokenizer import EOS

_ASSISTANT = "assistant\n"
# What cross_entropy leaves out.
NONE = -100


@dataclass(frozen=True)
class Batch:
    """One right-padded batch."""

    ids: torch.Tensor  # Token ids, int64 [B, S]
    # True where the token at this place belongs to an answer or is the eos that ends it, bool [B, S]
    answer: torch.Tensor
    real: torch.Tensor  # True where the token is not padding, bool [B, S]
    # For the answer tokens in reading order, what is met on the way to each, int64 [N, M]; a shorter way is
    # filled up with the token itself, and a token that has none is its own
    trails: torch.Tensor
    subjects: torch.Tensor  # Whom or what the sentence at this place is about, as an id, or `NONE`, int64 [B, S]

    def answer_numbers(self) -> torch.Tensor:
        """The answer, counted from 0 over the batch, that each answer token belongs to, int64 [N] in reading order."""
        marks = self.answer[:, 1:]
        first = marks & ~self.answer[:, :-1]
        return first.flatten().cumsum(0)[marks.flatten()] - 1


def whole_answers(right: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Which answers are right to the last token.

    Args:
        right: Which answer tokens are right, bool [L, N] for any number L of readouts.
        numbers: The answer each token belongs to, int64 [N], ascending from 0.

    Returns:
        bool [L, A] over the A answers.
    """
    wrong = torch.zeros(right.shape[0], int(numbers[-1]) + 1, dtype=torch.int64)
    return wrong.index_add_(1, numbers, (~right).long()) == 0


@dataclass(frozen=True)
class Encoded:
    """One text as ids, with a mark on the tokens of its answers (the eos included), the way to each, and subjects."""

    ids: list[int]
    answer: list[bool]
    trails: list[tuple[int, ...]]
    subjects: list[int]


def plain_text(items: Sequence[Item]) -> str:
    """Story, then question and answer in turn; an eos ends each answer.

    The first prompt (`Item.prompt`) is continued exactly as a user's prompt would be.
    """
    asked = (items[0].prompt, *(item.turn for item in items[1:]))
    return " ".join(f"{question} {item.answer}{EOS}" for question, item in zip(asked, items, strict=True))


def chat_messages(items: Sequence[Item]) -> list[dict[str, str]]:
    """The same as chat turns: story and first question in the first user turn, one more question in each later one."""
    messages = []
    for number, item in enumerate(items):
        messages.append({"role": "user", "content": item.prompt if number == 0 else item.turn})
        messages.append({"role": "assistant", "content": item.answer})
    return messages


def encode(tokenizer: PreTrainedTokenizerFast, items: Sequence[Item], chat: bool, hints: bool = False) -> Encoded:
    """Encode the text of some items about one story and mark the tokens of their answers.

    Args:
        tokenizer: The micro-world's own, or without `hints` any whose vocabulary has `<|im_end|>`.
        items: Questions about one story.
        chat: Whether as chat turns.
        hints: Whether trails and subjects are wanted; without, a token is its own trail and has no subject.
    """
    text = str(tokenizer.apply_chat_template(chat_messages(items), tokenize=False)) if chat else plain_text(items)
    spans = _answer_spans(text, items, _ASSISTANT if chat else "")
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    marks = []
    trails: list[tuple[int, ...]] = []
    span = 0
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        while span < len(spans) and start >= spans[span][1]:
            span += 1
        marks.append(span < len(spans) and end > spans[span][0])
        if marks[-1]:
            way = _way(tokenizer, items[span], text[start:end].strip(' "')) if hints else ()
            trails.append((*way, token))
    about = subjects(tokenizer, encoding.ids) if hints else [NONE] * len(encoding.ids)
    return Encoded(encoding.ids, marks, trails, about)


def _way(tokenizer: PreTrainedTokenizerFast, item: Item, word: str) -> tuple[int, ...]:
    """Ids of what is met before a word of the answer: subject and trail without its end; for a yes or no all of it."""
    if not item.trail or word not in (item.key, item.trail[-1]):
        return ()
    steps = item.trail[:-1] if word == item.trail[-1] else item.trail
    return tuple(word_id(tokenizer, step) for step in (item.subject, *steps))


def fit(
    tokenizer: PreTrainedTokenizerFast,
    scene: Scene,
    chat: bool,
    length: int,
    hints: bool = False,
    otherwise: Scene | None = None,
) -> Encoded:
    """Encode as many of the scene's questions, in order, as fit into `length` tokens, from the first that does.

    Args:
        tokenizer: The micro-world's.
        scene: The scene.
        chat: Whether as chat turns.
        length: Most tokens.
        hints: As `encode` takes it.
        otherwise: Encoded in its place where none fits.

    Raises:
        ValueError: If none fits.
    """
    for first in range(len(scene.items)):
        whole = encode(tokenizer, scene.items[first:], chat, hints)
        after = [*whole.answer[1:], False]
        ends = [place for place, (mark, more) in enumerate(zip(whole.answer, after, strict=True), 1) if mark > more]
        cut = max((end for end in ends if end <= length), default=0)
        if cut:
            ways = whole.trails[: sum(whole.answer[:cut])]
            return Encoded(whole.ids[:cut], whole.answer[:cut], ways, whole.subjects[:cut])
    if otherwise is not None:
        return fit(tokenizer, otherwise, chat, length, hints)
    raise ValueError(f"a story and a question do not fit into {length} tokens: {scene.story!r}")


def word_id(tokenizer: PreTrainedTokenizerFast, word: str) -> int:
    """Id of a word as it stands inside a text, after a space; a digit stands by itself."""
    token = tokenizer.convert_tokens_to_ids(word if word.isdigit() else f"\u0120{word}")
    if token is None:
        raise ValueError(f"{word!r} is not one token")
    return int(token)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, bool]]:
    """For each id the word it stands for as an entity, else `NONE`; and whether a sentence ends there."""
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return [
        (
            word_id(tokenizer, text.strip()) if text.strip() in ENTITIES else NONE,
            text.strip() in (".", "?") or text.startswith("<|") or text.endswith("\n"),
        )
        for text in texts
    ]


def subjects(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[int]:
    """For each token the first person or thing of its sentence up to there, as an id; `NONE` before there is one."""
    vocabulary = _vocabulary(tokenizer)
    result = []
    now = NONE
    for token in ids:
        entity, ends = vocabulary[token]
        now = entity if now == NONE else now
        result.append(now)
        now = NONE if ends else now
    return result


def collate(rows: Sequence[Encoded], pad: int) -> Batch:
    """Pad rows on the right to the longest one."""

    def padded(values: Iterable[Sequence[Any]], fill: Any) -> torch.Tensor:
        return pad_sequence([torch.tensor(entry) for entry in values], batch_first=True, padding_value=fill)

    longest = max(len(trail) for row in rows for trail in row.trails)
    trails = [(*trail, *trail[-1:] * (longest - len(trail))) for row in rows for trail in row.trails]
    return Batch(
        ids=padded((row.ids for row in rows), pad),
        answer=padded((row.answer for row in rows), False),
        real=padded(([True] * len(row.ids) for row in rows), False),
        trails=torch.tensor(trails),
        subjects=padded((row.subjects for row in rows), NONE),
    )


def _answer_spans(text: str, items: Sequence[Item], before: str) -> list[tuple[int, int]]:
    spans = []
    cursor = 0
    for item in items:
        cursor = text.index(item.question, cursor) + len(item.question)
        start = text.index(f"{before}{item.answer}{EOS}", cursor) + len(before)
        cursor = start + len(item.answer) + len(EOS)
        # in plain text the space before an answer is its own, also where it is a token by itself
        first = start + len(item.given) if item.given or before else start - 1
        spans.append((first, cursor))
    return spans


_AGES = tuple(str(age) for age in range(YOUNGEST, OLDEST + 1))
# Sources, goals, and a ladder of forms of notes, from two words to the sentences of the stories: what is told moves
# away from whom it is told of, step by step.
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
    """Make row `index`: short notes about two to five people or things, all of one kind, again and again.

    A model that starts on stories and questions stays for long on a plateau where it names any place of the story. A
    note that repeats what an earlier one said can be completed only by looking it up, and a row holds a dozen of them.

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
    output: set[str] = set()
    while len(ids) < LENGTH:
        place = rng.randrange(count)
        source, goal = who[place], what[place]
        note = rng.choice(forms).format(x=source, y=goal)
        encoding = tokenizer.backend_tokenizer.encode(note, add_special_tokens=False)
        start = note.rindex(f" {goal}") + 1
        marks += [source in output and begin <= start < end for begin, end in encoding.offsets]
        first = word_id(tokenizer, source)
        began = note.index(f" {source}")
        about += [first if end > began + 1 else NONE for _, end in encoding.offsets]
        ids += encoding.ids
        output.add(source)
    ways: list[tuple[int, ...]] = [
        (subject, token) for subject, token, mark in zip(about, ids, marks, strict=True) if mark
    ]
    return Encoded(ids, marks, ways, about)
