import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.lemma import boxed

plain = st.text(alphabet="ab1 +^_", max_size=6)
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner | inner.map(lambda text: "{" + text + "}"), max_size=4).map("".join),
    max_leaves=8,
)


@given(nested, st.text(max_size=20).filter(lambda text: "boxed" not in text), nested)
def test_the_last_box_is_read_whatever_braces_it_holds(first, between, last):
    text = f"\\boxed{{{first}}} {between} \\boxed{{{last}}} so it is }}"
    result = boxed(text)
    if last.strip():
        assert result == last.strip()
    else:
        assert result is None or not last.strip()


@given(st.text(alphabet="\\boxed{} 1", max_size=60))
def test_any_text_can_be_read(text):
    result = boxed(text)
    assert result is None or (result in text and result == result.strip() != "")


@pytest.mark.parametrize(
    "text, answer",
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\}}", "\\}"),
        ("\\boxed{}", None),
        ("42", None),
        ("\\boxed{" + "x" * 2000 + "}", None),
    ],
)
def test_boxes_are_read(text, answer):
    assert boxed(text) == answer
