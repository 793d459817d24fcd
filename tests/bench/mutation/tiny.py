"""A tree of one module and one test file."""

SOURCE = '''"""Not to be mutated: 1 + 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3 + 4

__all__ = ["larger"]
STEP = 1


def larger(first: "int | float", second: "int | float") -> "int | float":
    """The larger one, of 2."""
    if first is None:
        raise ValueError("not " * 2 + "a number")
    return first if first > second else second


def count_down(number):
    while number > 0:
        number -= 1
    return number


def untested(number):
    return number + 5
'''
TESTS = """import pytest

from sigma0.decode import tiny


@pytest.fixture(scope="module")
def largest():
    return tiny.larger(1, 2)


def test_larger():
    assert tiny.larger(3, 2) == 3


def test_shared(largest):
    assert largest == 2


def test_of_the_same_fixture(largest):
    assert largest > 1


def test_count_down():
    assert tiny.count_down(3) == 0


@pytest.mark.slow
def test_slow():
    assert tiny.untested(1) == 6


def test_that_fails():
    assert tiny.larger(1, 1) == 2
"""


def write_tree(root):
    for folder in ("sigma0/decode", "tests/decode", "bench"):
        (root / folder).mkdir(parents=True)
        if folder != "bench":
            (root / folder / "__init__.py").touch()
    (root / "sigma0/__init__.py").touch()
    (root / "tests/__init__.py").touch()
    (root / "sigma0/bench").symlink_to("../bench")
    (root / "sigma0/decode/tiny.py").write_text(SOURCE)
    (root / "tests/decode/test_tiny.py").write_text(TESTS)
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "-m \'not slow\'"\nmarkers = ["slow: not fast"]\n'
    )
    return root
