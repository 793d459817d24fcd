"""Problems written for these tests, in the format of the published ones."""

import json

from sigma0.bench.humaneval.problems import Problem

DOUBLE = Problem(
    task_id="Test/0",
    prompt='def double(x: int) -> int:\n    """Twice x.\n    >>> double(2)\n    4\n    """\n',
    entry_point="double",
    canonical_solution="    return 2 * x\n",
    test="def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n",
)
VOWELS = Problem(
    task_id="Test/1",
    prompt='from typing import List\n\n\ndef vowels(text: str) -> List[str]:\n    """The vowels of a text."""\n',
    entry_point="vowels",
    canonical_solution='    return [each for each in text if each in "aeiou"]\n',
    test=(
        'METADATA = {}\n\n\ndef check(candidate):\n    assert candidate("sigma") == ["i", "a"]\n'
        '    assert candidate("") == []\n'
    ),
)
PROBLEMS = [DOUBLE, VOWELS]


def write_problems(path, problems=PROBLEMS):
    rows = [item if isinstance(item, dict) else item.model_dump() for item in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
