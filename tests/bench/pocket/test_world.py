"""The micro-world: right answers, disjoint splits, determinism, guesses worth little."""

import re
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from sigma0.bench.pocket.items import DIFFICULTIES, SPLITS, Item, split_of
from sigma0.bench.pocket.moves import LEVELS, NAMES, PLACES, THINGS
from sigma0.bench.pocket.world import draw

# The independent reader: it knows only the text of a story, never the generator's state.
_NAME = r"(?P<who>[A-Z][a-z]+)"
_WALK = re.compile(_NAME + r" (?:went|walked) to the (?P<place>[a-z]+)")
_TAKE = re.compile(_NAME + r" (?:took|picked up) the (?P<thing>[a-z]+)")
_DROP = re.compile(_NAME + r" (?:dropped|put down) the (?P<thing>[a-z]+)")
_GIVE = re.compile(_NAME + r" gave the (?P<thing>[a-z]+) to (?P<taker>[A-Z][a-z]+)")


def _snapshots(story: str) -> list[tuple[dict[str, str], dict[str, str], dict[str, str]]]:
    """After each sentence: person -> place, thing -> holder (held things only), thing -> place."""
    place: dict[str, str] = {}
    holder: dict[str, str] = {}
    lies: dict[str, str] = {}
    shots = []
    for sentence in story.rstrip(".").split(". "):
        if match := _WALK.fullmatch(sentence):
            place[match["who"]] = match["place"]
        elif match := _TAKE.fullmatch(sentence):
            where = lies.get(match["thing"], place[match["who"]])
            assert match["thing"] not in holder and where == place[match["who"]], f"impossible: {sentence}"
            holder[match["thing"]] = match["who"]
        elif match := _DROP.fullmatch(sentence):
            assert holder.pop(match["thing"]) == match["who"], f"impossible: {sentence}"
        elif match := _GIVE.fullmatch(sentence):
            assert holder[match["thing"]] == match["who"], f"impossible: {sentence}"
            assert place[match["who"]] == place[match["taker"]], f"impossible: {sentence}"
            holder[match["thing"]] = match["taker"]
        else:
            raise AssertionError(f"unread sentence: {sentence}")
        lies |= {thing: place[who] for thing, who in holder.items()}
        shots.append((dict(place), dict(holder), dict(lies)))
    return shots


def _answer(story: str, question: str) -> str:
    """Answer any question of the moves world by scanning the snapshots."""
    shots = _snapshots(story)
    place, holder, lies = shots[-1]
    if match := re.fullmatch(r"Where is the ([a-z]+)\?", question):
        return f"The {match[1]} is in the {lies[match[1]]}."
    if match := re.fullmatch(r"Where is ([A-Z][a-z]+)\?", question):
        return f"{match[1]} is in the {place[match[1]]}."
    if match := re.fullmatch(r"Who has the ([a-z]+)\?", question):
        return f"{holder[match[1]]} has the {match[1]}."
    if match := re.fullmatch(r"What does ([A-Z][a-z]+) have\?", question):
        (thing,) = [thing for thing, who in holder.items() if who == match[1]]
        return f"{match[1]} has the {thing}."
    if match := re.fullmatch(r"Who is with ([A-Z][a-z]+)\?", question):
        (other,) = [who for who, where in place.items() if where == place[match[1]] and who != match[1]]
        return f"{other} is with {match[1]}."
    if match := re.fullmatch(r"Where was ([A-Z][a-z]+) before the ([a-z]+)\?", question):
        return f"{match[1]} was in the {_earlier([shot[0].get(match[1]) for shot in shots], match[2])}."
    if match := re.fullmatch(r"Where was the ([a-z]+) before the ([a-z]+)\?", question):
        return f"The {match[1]} was in the {_earlier([shot[2].get(match[1]) for shot in shots], match[2])}."
    raise AssertionError(f"unread question: {question}")


def _earlier(places: list[str | None], now: str) -> str:
    assert places[-1] == now
    return next(place for place in reversed(places) if place is not None and place != now)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_answers_match_an_independent_simulator(difficulty: int) -> None:
    families = set()
    for index in range(150):
        scene = draw("train", 3, index, difficulty=difficulty)
        assert scene.items
        for item in scene.items:
            assert item.answer == _answer(item.story, item.question), item
            assert item.story == scene.story
            assert item.difficulty == difficulty
            families.add(item.family)
    assert families == set(LEVELS[difficulty].families)


def test_questions_about_a_story_differ() -> None:
    for index in range(200):
        questions = [item.question for item in draw("train", 4, index).items]
        assert len(set(questions)) == len(questions)


def test_derivation_holds_the_sentences_the_answer_rests_on() -> None:
    for index in range(300):
        for item in draw("test", 5, index).items:
            told = item.story.rstrip(".").split(". ")
            steps = [step.rstrip(".") for step in item.derivation[:-1]]
            assert len(steps) == item.hops
            places = [told.index(steps[0])]
            for step in steps[1:]:
                places.append(told.index(step, places[-1] + 1))
            assert item.derivation[-1].lower() == f"so {item.answer.lower()}"
            if item.family in ("where", "carries", "object", "before", "together"):
                # The sentences alone, in their order, lead to the same answer.
                needed = {word for step in steps for word in step.split()}
                assert item.key in needed


def test_every_hop_count_up_to_three_occurs() -> None:
    hops = Counter(item.hops for index in range(300) for item in draw("train", 6, index, difficulty=6).items)
    assert set(hops) == {1, 2, 3, 4}


def test_splits_share_no_story_even_under_one_seed() -> None:
    stories = {split: {draw(split, 0, index, difficulty=1).story for index in range(400)} for split in SPLITS}
    assert all(split_of(story) == split for split, told in stories.items() for story in told)
    assert not stories["train"] & stories["test"]
    assert not stories["train"] & stories["calibration"]
    assert not stories["calibration"] & stories["test"]


def test_splits_have_their_shares() -> None:
    shares = Counter(split_of(f"story {number}") for number in range(20000))
    assert shares["test"] / 20000 == pytest.approx(26 / 256, abs=0.01)
    assert shares["calibration"] / 20000 == pytest.approx(26 / 256, abs=0.01)


def test_a_scene_is_a_function_of_split_seed_and_index() -> None:
    assert draw("test", 1, 7) == draw("test", 1, 7)
    assert len({draw(split, seed, index).story for split in SPLITS for seed in (0, 1) for index in range(20)}) == 120


def test_more_difficult_stories_are_longer() -> None:
    words = [sum(len(draw("train", 8, k, difficulty=d).story.split()) for k in range(100)) for d in DIFFICULTIES]
    assert words == sorted(words) and len(set(words)) == len(words)


def test_guesses_that_read_no_question_are_worth_at_most_a_quarter() -> None:
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for index in range(2000):
        item = draw("test", 9, index, questions=1).items[0]
        words = item.story.replace(".", "").split()
        kind = next(kind for kind in (NAMES, PLACES, THINGS) if item.key in kind)
        seen = [word for word in words if word in kind and word not in item.question.rstrip("?").split()]
        guesses = {"first": seen[0], "last": seen[-1], "commonest": Counter(seen).most_common(1)[0][0]}
        for name, guess in guesses.items():
            right[item.family, name].append(guess == item.key)
    for (family, name), hits in right.items():
        # Three standard errors of a quarter.
        slack = 3 * (0.25 * 0.75 / len(hits)) ** 0.5
        assert sum(hits) / len(hits) <= 0.25 + slack, (family, name, sum(hits) / len(hits))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("dev", 0, 0), "dev"),
        (("test", 0, -1), "-1"),
        (("test", 0, 0, 7), "7"),
        (("test", 0, 0, 1, 0), "0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        draw(*arguments)


def test_an_item_checks_itself() -> None:
    item = draw("test", 0, 0).items[0]
    with pytest.raises(ValueError, match="moon"):
        replace(item, key="moon")
    with pytest.raises(ValueError, match="9"):
        replace(item, difficulty=9)
    with pytest.raises(ValueError, match="hops 0"):
        replace(item, hops=0)
    assert isinstance(item, Item)
