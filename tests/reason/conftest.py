import os
import shutil

import pytest

from sigma0.bench.pocket.tokenizer import build_tokenizer
from sigma0.decode.grammar.spec import parse_spec
from sigma0.decode.grammar.vocabulary import Vocabulary
from tests.reason.sandbox.sandboxes import WHY_NOT, Sandboxed, folder_of_the_sandbox, interpreter_of_nobody

USERS = ("root", "ordinary")
WHO = USERS[os.geteuid() != 0]


@pytest.fixture
def path(tmp_path):
    """Where a run leaves its lines."""
    return tmp_path / "run.jsonl"


@pytest.fixture(scope="session")
def allows():
    """Whether a grammar allows a whole text of pocket's tokens."""
    pytest.importorskip("llguidance")
    tokenizer = build_tokenizer()
    vocabulary = Vocabulary(tokenizer, len(tokenizer), {tokenizer.eos_token_id})

    def whole(grammar, text):
        matcher = vocabulary.compile(parse_spec(grammar=grammar)).matcher()
        for token_id in (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id):
            if not matcher.mask()[token_id >> 5] >> (token_id & 31) & 1:
                return False
            matcher.take(token_id)
        return True

    return whole


@pytest.fixture(scope="module")
def folder():
    made = folder_of_the_sandbox()
    yield made
    shutil.rmtree(made)


# the user that the tests are run by among the fast ones, the other among the slow
@pytest.fixture(params=[pytest.param(user, marks=[] if user == WHO else pytest.mark.slow) for user in USERS])
def box(request, folder):
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("the tests are not run as root")
    if request.param == "root" or os.geteuid() != 0:
        return Sandboxed(folder, request.param)
    if interpreter_of_nobody() is None:
        pytest.skip("no interpreter of Python 3.10 or later that any user may start")
    return Sandboxed(folder, request.param, interpreter_of_nobody())
