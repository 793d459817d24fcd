import pytest

from sigma0.reason.trail import Decision, Heading, Trail, read_lines

HEADING = Heading("lemma", "p", ("m",), {}, {})


def test_a_run_goes_on_behind_a_line_that_a_crash_cut_off(path):
    first = Trail(path)
    first.add(HEADING)
    first.decide("pass", "one")
    with path.open("a") as file:
        file.write('{"what": "fail", "wh')
    second = Trail(path)
    second.decide("pass", "two")
    assert list(read_lines(path)) == [HEADING, Decision("pass", "one", {}), Decision("pass", "two", {})]


@pytest.mark.parametrize("text", ["my notes", "my notes\nof years\n", '{"unit": "token"}\n', "[" * 50_000])
def test_a_file_that_is_no_trail_is_left_as_it_is(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="no trail of an outer loop"):
        Trail(path)
    assert path.read_text() == text


def test_half_a_surrogate_pair_ends_no_run(path):
    trail = Trail(path)
    trail.add(HEADING)
    trail.decide("pass", "a\ud800b\u2028c")
    assert read_lines(path)[1] == Decision("pass", "a?b\u2028c", {})


@pytest.mark.parametrize("line", ['{"kind": ["x"]}', "[" * 50_000, "7", '{"kind": "call", "n": ' + "9" * 5000 + "}"])
def test_a_line_of_nonsense_is_named(path, line):
    Trail(path).add(HEADING)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match="line 2 of"):
        read_lines(path)
