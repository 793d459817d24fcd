"""What of a sentence is an identifier or a link, and what only looks like one."""

import pytest

from sigma0.signals.grounding.claims import checkable


@pytest.mark.parametrize(
    "text, code",
    [
        ("os.path", ("os.path",)),
        ("np.array()", ("np.array()",)),
        ("aa.bb.cc", ("aa.bb.cc",)),
        # one letter on one side is enough of a name, single letters alone are an abbreviation
        ("ab.c", ("ab.c",)),
        ("a.b", ()),
        ("a.b()", ("a.b()",)),
        ("U.S", ()),
        # two sentences without a space between them
        ("the end.Then he", ()),
        ("x y", ()),
        ("`x y`", ("x y",)),
        ("snake_case", ("snake_case",)),
        ("camelCase", ("camelCase",)),
        ("f()", ("f()",)),
        ("5KM", ()),
        ("kW", ()),
        ("3.2.1 or v1.2.3", ("3.2.1", "v1.2.3")),
    ],
)
def test_identifiers(text, code):
    assert checkable(f"one may see {text} there").code == code


@pytest.mark.parametrize(
    "text, link",
    [
        ("https://a.org/x", "https://a.org/x"),
        ("https://a.org/x(y). Then", "https://a.org/x(y)"),
        ("(https://a.org/x) there", "https://a.org/x"),
        ("(https://a.org/x(y)) there", "https://a.org/x(y)"),
        ("https://a.org/x!? There", "https://a.org/x"),
        ("www.a.org/b, and", "www.a.org/b"),
        ("a.org/b there", "a.org/b"),
    ],
)
def test_links_end_before_what_stands_around_them(text, link):
    assert checkable(f"one may see {text}").links == (link,)
    assert checkable("one may see a.org there").links == ()


@pytest.mark.parametrize(
    "text, month", [("2024-00-05", None), ("2024-01-05", 1), ("2024-12-05", 12), ("2024-13-05", None)]
)
def test_a_date_has_a_month_of_twelve(text, month):
    assert [date.month for date in checkable(f"It was on {text} there").dates] == ([] if month is None else [month])
