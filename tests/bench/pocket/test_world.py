"""The micro-world: right answers, disjoint splits, determinism, guesses worth little."""

import re
from collections import Counter, defaultdict
from dataclasses import fields, replace

import pytest

from sigma0.bench.pocket.items import DIFFICULTIES, SHORT, SPLITS, split_of
from sigma0.bench.pocket.stories import AGE_CHAINS, CHAINS, CITIES, KINDS, NAMES, PLACES, UNSAID
from sigma0.bench.pocket.world import PEOPLE, Mix, draw

FAMILIES = {"where", "inside", "holder", "origin", "descent", "age", "older"}
BINARY = {"inside", "descent", "older"}

# The independent reader: it knows only the text of a story, never the generator's state.
_A, _B = r"(?P<a>[A-Za-z]+)", r"(?P<b>[A-Za-z0-9]+)"
_POINTERS = [
    re.compile(form)
    for form in (
        rf"{_A} (?:went|walked) to the {_B}",
        rf"The {_A} (?:was taken by|is with) {_B}",
        rf"The {_A} (?:is in|was put into|was left in) the {_B}",
        rf"The family of {_A} comes from {_B}",
        rf"{_A} comes from {_B}",
        rf"{_A} is a child of {_B}",
        rf"The parent of {_A} is {_B}",
        rf"{_A} is {_B} years old",
    )
]
_COMPARED = re.compile(rf"{_A} is (?:(?P<n>\d) years? (?P<way>older|younger) than|as old as) {_B}")


def _read(story):
    """What everything points to after the last sentence, and the years to add on the way."""
    goal, years = {}, {}
    for sentence in story.rstrip(".").split(". "):
        match = next((result for form in [*_POINTERS, _COMPARED] if (result := form.fullmatch(sentence))), None)
        assert match, f"unread sentence: {sentence}"
        if " was left in " in sentence and match["a"] in goal:
            assert goal[goal[match["a"]]] == match["b"], f"impossible: {sentence}"
        goal[match["a"]] = match["b"]
        groups = match.groupdict()
        years[match["a"]] = int(groups.get("n") or 0) * (-1 if groups.get("way") == "younger" else 1)
    return goal, years


def _answer(story, question):
    goal, years = _read(story)

    def end(source, stop=()):
        path = [source]
        while path[-1] in goal and (path[-1] not in stop or path[-1] == source):
            path.append(goal[path[-1]])
        return path[-1]

    def age(name):
        return years[name] + age(goal[name]) if name in goal else int(name)

    def untold(known, *ends):
        return not all(end in known for end in ends)

    if match := re.fullmatch(r"Where is ((?:the )?([A-Za-z]+))\?", question):
        if untold(PLACES, end(match[2])):
            return UNSAID
        return f"{match[1][0].upper()}{match[1][1:]} is in the {end(match[2])}."
    if match := re.fullmatch(r"Is ((?:the )?([A-Za-z]+)) in the ([a-z]+)\?", question):
        result = end(match[2])
        if untold(PLACES, result):
            return UNSAID
        return f"{'Yes' if result == match[3] else 'No'}, {match[1]} is in the {result}."
    if match := re.fullmatch(r"Who has the ([a-z]+)\?", question):
        holder = end(match[1], NAMES)
        return f"The {match[1]} is with {holder}." if holder in NAMES else UNSAID
    if match := re.fullmatch(r"Where does the family of (\w+) come from\?", question):
        return UNSAID if untold(CITIES, end(match[1])) else f"The family of {match[1]} comes from {end(match[1])}."
    if match := re.fullmatch(r"Does the family of (\w+) come from (\w+)\?", question):
        result = end(match[1])
        if untold(CITIES, result):
            return UNSAID
        return f"{'Yes' if result == match[2] else 'No'}, the family of {match[1]} comes from {result}."
    if (match := re.fullmatch(r"(?:How old is|Is) (\w+)(?: older than \w+)?\?", question)) and untold(
        "23456789", end(match[1])
    ):
        return UNSAID
    if match := re.fullmatch(r"How old is (\w+)\?", question):
        return f"{match[1]} is {age(match[1])} years old."
    if match := re.fullmatch(r"Is (\w+) older than (\w+)\?", question):
        assert age(match[1]) != age(match[2])
        older = age(match[1]) > age(match[2])
        return f"{'Yes' if older else 'No'}, {match[1]} is {'older' if older else 'younger'} than {match[2]}."
    raise AssertionError(f"unread question: {question}")


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_answers_match_an_independent_simulator(difficulty):
    families = set()
    for index in range(150):
        scene = draw("train", 3, index, difficulty=difficulty)
        questions, hops = [item.question for item in scene.items], [item.hops for item in scene.items]
        # An answer is a fact: asked later, a deeper question could start from it.
        assert questions and len(set(questions)) == len(questions) and hops == sorted(hops, reverse=True)
        for item in scene.items:
            assert item.answer == _answer(item.story, item.question), item
            assert (item.story, item.difficulty) == (scene.story, difficulty)
            families.add(item.family)
    assert families == (FAMILIES - {"holder"} if difficulty == 1 else FAMILIES)


def test_what_people_ask_is_answered_by_all_that_was_told_up_to_there():
    """Few sentences, what nobody told, stories that go on: each answer against the reader of the whole text."""
    seen = Counter()
    for index in range(300):
        scene = draw("train", 4, index, mix=PEOPLE)
        told = scene.story
        for place, item in enumerate(scene.items):
            told = f"{told} {item.more}" if item.more else told
            assert item.story == told and item.answer == _answer(told, item.question), item
            assert item.turn.removesuffix(item.question).strip() == item.more and (place or not item.more)
            seen[item.family] += 1
            seen["more"] += bool(item.more)
        first = scene.items[0]
        seen["short"] += first.difficulty == SHORT and len(first.story.split(". ")) <= 4
        assert split_of(first.story) == "train"
    assert set(seen) == {*FAMILIES, "unsaid", "more", "short"} and min(seen.values()) > 20
    assert 0.08 < seen["unsaid"] / sum(seen[family] for family in (*FAMILIES, "unsaid")) < 0.2


def test_derivation_and_trail_hold_the_sentences_the_answer_rests_on():
    for item in (item for index in range(300) for item in draw("test", 5, index).items):
        output = item.story.rstrip(".").split(". ")
        steps = [step.rstrip(".") for step in item.derivation[:-1]]
        assert len(steps) == item.hops and all(step in output for step in steps)
        assert item.derivation[-1].lower() == f"so {item.answer.lower()}"
        # The sentences alone lead to the same answer.
        if item.family != "older" or len({*steps}) == len(steps):
            assert _answer(". ".join(sorted(steps, key=output.index)) + ".", item.question) == item.answer
        assert len(item.trail) == (0 if item.family == "older" else item.hops)
        for word, sentence in zip(item.trail[:-1], item.derivation, strict=False):
            assert word in sentence.rstrip(".").split()
        assert not item.trail or item.trail[-1] in item.answer.rstrip(".").split()


@pytest.mark.parametrize("chains, deepest", [(CHAINS, 7), (AGE_CHAINS, 5)])
def test_hops_and_length_rise_with_the_difficulty(chains, deepest):
    longest = [max(lengths) for lengths in chains]
    assert longest == sorted(longest) and (longest[0], longest[-1]) == (1, deepest)
    assert min(map(len, chains)) >= 4, "fewer than four places make a guess worth more than a quarter"
    words = [sum(len(draw("train", 8, k, difficulty=d).story.split()) for k in range(100)) for d in DIFFICULTIES]
    assert words == sorted(words) and len(set(words)) == len(words)


def test_a_scene_is_a_function_of_split_seed_and_index_in_splits_that_share_no_story():
    assert draw("test", 1, 7) == draw("test", 1, 7)
    assert len({draw(split, seed, index).story for split in SPLITS for seed in (0, 1) for index in range(20)}) == 120
    # the easiest stories are the ones that come up again
    easy = {split: {draw(split, 0, index, difficulty=1).story for index in range(100)} for split in SPLITS}
    assert all(split_of(story) == split for split, output in easy.items() for story in output)
    shares = Counter(split_of(f"story {number}") for number in range(20000))
    for split in ("test", "calibration"):
        assert shares[split] / 20000 == pytest.approx(26 / 256, abs=0.01)


@pytest.mark.exhaustive
def test_guesses_that_read_no_question_are_worth_at_most_a_quarter():
    right = defaultdict(list)
    for index in range(8000):
        item = draw("test", 9, index, difficulty=1 + index % 6, questions=1, mix=Mix(binary=0)).items[0]
        words = item.story.replace(".", "").split()
        kinds = (NAMES, PLACES, CITIES, tuple("23456789"))
        kind = next(kind for kind in kinds if item.key in kind)
        seen = [word for word in words if word in kind and word not in item.question.rstrip("?").split()]
        guesses = {"first": seen[0], "last": seen[-1], "commonest": Counter(seen).most_common(1)[0][0]}
        for name, guess in guesses.items():
            right[item.family, item.difficulty, name].append(guess == item.key)
    assert {family for family, _, _ in right} == {"where", "holder", "origin", "age"}
    for (family, difficulty, name), hits in right.items():
        # Four standard errors of a quarter: there are some seventy figures.
        slack = 4 * (0.25 * 0.75 / len(hits)) ** 0.5
        assert sum(hits) / len(hits) <= 0.25 + slack, (family, difficulty, name, sum(hits) / len(hits))


@pytest.mark.slow
def test_yes_and_no_are_balanced():
    items = [draw("test", 10, index, questions=1).items[0] for index in range(4000)]
    for family in BINARY:
        keys = [item.key for item in items if item.family == family]
        assert len(keys) > 100
        assert keys.count("Yes") / len(keys) == pytest.approx(0.5, abs=1.5 / len(keys) ** 0.5)
    assert all(item.binary == (item.family in BINARY) for item in items)
    # One age alone must not tell who is older: the two are drawn alike.
    older = [item.question.rstrip("?").split()[1::3] for item in items if item.family == "older"]
    assert all(first != second for first, second in older)
    assert {item.family for item in items} == FAMILIES


def test_a_mix_and_the_hardest_difficulty_rule_what_is_drawn():
    assert set(KINDS) < {field.name for field in fields(Mix)}
    for kind, asked in (("moves", {"where", "inside", "holder"}), ("ages", {"age", "older"})):
        alone = Mix(**{**dict.fromkeys(KINDS, 0), kind: 1})
        assert {i.family for n in range(60) for i in draw("train", 0, n, mix=alone).items} == asked
    for share, expected in ((0.0, False), (1.0, True)):
        items = [item for n in range(40) for item in draw("train", 0, n, mix=Mix(binary=share)).items]
        assert all(item.binary == expected for item in items)
    for hardest in (2, 6):
        drawn = {draw("train", 0, n, questions=1, hardest=hardest).items[0].difficulty for n in range(60)}
        assert drawn == set(range(1, hardest + 1))


def test_an_unknown_split_and_an_item_without_its_key_are_refused():
    with pytest.raises(ValueError, match="dev"):
        draw("dev", 0, 0)
    with pytest.raises(ValueError, match="moon"):
        replace(draw("test", 0, 0).items[0], key="moon")
