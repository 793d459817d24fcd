"""Lines that several writers append, of whom some are killed."""

from concurrent.futures import ThreadPoolExecutor

from sigma0.bench.core.ledger import alone, append, cut
from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.cache import AnswerCache
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import Completion


def test_lines_of_several_writers_are_whole(tmp_path):
    path = tmp_path / "lines"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, [path] * 2, "ab"))
    lines = path.read_text().splitlines()
    assert sorted(lines) == ["a" * 5000] * 20 + ["b" * 5000] * 20


def write(path, letter):
    for _ in range(20):
        with alone(path):
            append(path, letter.encode() * 5000)


def test_a_half_written_line_goes_before_the_next(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"half")
    append(path, b"first")
    assert path.read_bytes() == b"first\n"
    path.write_bytes(b"first\nhal")
    append(path, b"second")
    assert path.read_bytes() == b"first\nsecond\n"
    assert cut(path) == b"" and cut(tmp_path / "none") == b""
    path.write_bytes(b"first\nhal")
    assert cut(path) == b"hal" and path.read_bytes() == b"first\n"


def test_two_caches_share_a_file_that_a_third_was_killed_over(tmp_path):
    path, chat = tmp_path / "answers.jsonl", ScriptedChat([], "pocket")
    one, two = AnswerCache(path, {"pocket": "a"}), AnswerCache(path, {"pocket": "a"})
    questions = [[{"role": "user", "content": text}] for text in ("first", "second", "third")]
    one.put(chat, questions[0], AskSettings(), Completion("1"))
    with path.open("a") as file:
        file.write('{"key": "hal')
    two.put(chat, questions[1], AskSettings(), Completion("2"))
    one.put(chat, questions[2], AskSettings(), Completion("3"))
    found = AnswerCache(path, {"pocket": "a"})
    assert [found.get(chat, each, AskSettings()).text for each in questions] == ["1", "2", "3"]
    assert two.get(chat, questions[0], AskSettings()) is None, "read when it was opened"
