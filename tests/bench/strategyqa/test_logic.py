import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.strategyqa.logic import evaluate, parse_condition
from sigma0.bench.strategyqa.values import Undecided, value_of


def told(text, *answers):
    found = evaluate(parse_condition(text), [value_of(answer) for answer in answers])
    return found if isinstance(found, bool) else None


@pytest.mark.parametrize(
    "text, answers, expected",
    [
        ("#1 < #2", ("3", "5"), True),
        ("#1>=#2", ("3", "5"), False),
        ("#1 = #2", ("Paris", "paris"), True),
        ("#1 == #2", ("Paris", "Rome"), False),
        ("#1 != #2", ("Paris", "Rome"), True),
        ("#1 > 2.5", ("3",), True),
        ("#1 < -1", ("3",), False),
        ('#1 = "The Alps"', ("alps",), True),
        ("#1", ("Yes",), True),
        ("not #1", ("Yes",), False),
        ("#1 = no", ("No",), True),
        ("NOT #1 AND #2", ("No", "Yes"), True),
        ("not (#1 and #2)", ("No", "Yes"), True),
        ("#1 or #2 and #3", ("Yes", "No", "No"), True),
        ("(#1 or #2) and #3", ("Yes", "No", "No"), False),
        ("not not #1", ("Yes",), True),
        ("  #1  ", ("Yes",), True),
    ],
)
def test_conditions_are_worked_out(text, answers, expected):
    assert told(text, *answers) is expected


@pytest.mark.parametrize(
    "text, answers",
    [
        ("#1", ("Paris",)),
        ("#1", ("7",)),
        ("#2", ("Yes",)),
        ("#0", ("Yes",)),
        ("#1 < #2", ("Paris", "7")),
        ("not #1", ("7",)),
        ("#1 and #2", ("Yes", "7")),
        ("#1 or #2", ("No", "7")),
    ],
)
def test_what_rests_on_something_open_is_open(text, answers):
    assert isinstance(evaluate(parse_condition(text), [value_of(answer) for answer in answers]), Undecided)


def test_a_part_that_decides_leaves_nothing_open():
    assert told("#2 and #1", "No", "7") is False
    assert told("#2 or #1", "Yes", "7") is True
    assert told("not (#2 and #1)", "No", "7") is True


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "ends too early"),
        ("#1 <", "ends too early"),
        ("< #1", "'<' is no step"),
        ("#1 #2", "goes on with '#2'"),
        ("#1 < #2 < #3", "goes on with '<'"),
        ("(#1", "not closed"),
        ("#1)", "goes on with"),
        ("none", "'none' is no step"),
        ("__import__('os')", "no part"),
        ("#1 is less than #2", "goes on with 'is'"),
        ('#1 = "open', "no part"),
        ("#1 ; #2", "no part"),
        ("and", "'and' is no step"),
        ("(" * 60 + "#1" + ")" * 60, "at most 20 deep"),
        ("not " * 40 + "#1", "at most 20 deep"),
        ("#1 and " * 40 + "#1", "at most 200 characters"),
    ],
)
def test_what_is_no_condition_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        parse_condition(text)


CONDITIONS = st.recursive(
    st.sampled_from(["#1", "#2", "#3"]),
    lambda part: st.one_of(
        part.map(lambda each: f"not {each}"),
        st.tuples(part, st.sampled_from(["and", "or"]), part).map(lambda each: f"({' '.join(each)})"),
    ),
    max_leaves=8,
)


@given(CONDITIONS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_conditions_on_truths_are_those_of_python(text, truths):
    names = dict(zip(("a", "b", "c"), truths, strict=True))
    expected = eval(text.replace("#1", "a").replace("#2", "b").replace("#3", "c"), {}, names)
    assert told(text, *("Yes" if truth else "No" for truth in truths)) is expected


@pytest.mark.slow
@given(st.text(alphabet="#123<>=!() andortyes\"'.-", max_size=60), st.lists(st.text(max_size=20), max_size=4))
def test_no_text_does_more_than_be_refused(text, answers):
    try:
        condition = parse_condition(text)
    except ValueError:
        return
    assert isinstance(evaluate(condition, [value_of(answer) for answer in answers]), (bool, Undecided))
