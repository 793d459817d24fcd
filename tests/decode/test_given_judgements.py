"""Drafts that are judged by a course: they stand from the loop that it names."""

from types import SimpleNamespace

import pytest
import torch

from sigma0.decode.lanes import CACHE_POSITION, DEPTH, DRAFT, STAGE, TABLE_WIDTH
from sigma0.decode.sampling import judged
from sigma0.decode.settings import PROMPT, SETTINGS_WIDTH

LOOPS = 4
# of two sequences, by place behind the prompt; then from the start again
SETTLED = torch.tensor([[1, 2, 3], [4, 3, 2]])
PROMPTS = (5, 7)


def asked(sequence, place, stage, drafted_at, loops):
    """What becomes of one row: a token id of 10 read now, a draft of 20, and whether it stands."""
    table = torch.zeros(1, TABLE_WIDTH, dtype=torch.int64)
    table[0, [STAGE, CACHE_POSITION, DRAFT, DEPTH]] = torch.tensor([stage, PROMPTS[sequence] + place, 20, drafted_at])
    wanted = torch.zeros(2, SETTINGS_WIDTH, dtype=torch.int64)
    wanted[:, PROMPT] = torch.tensor(PROMPTS)
    batch = SimpleNamespace(
        settings=SimpleNamespace(settled=SETTLED, table=wanted), lanes=SimpleNamespace(depth=LOOPS)
    )  # fmt: skip
    # a row before it that nobody asks for
    looped = SimpleNamespace(
        table=torch.cat([torch.full_like(table, 99), table]),
        sequences=torch.tensor([0, sequence]),
        loops=torch.tensor([99, loops]),
    )
    token_ids, stands = judged(batch, looped, torch.tensor([1]), torch.tensor([10]), torch.tensor([False]))
    return int(token_ids), bool(stands)


@pytest.mark.parametrize("sequence", [0, 1])
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("drafted_at", [1, 2, 3, 4])
@pytest.mark.parametrize("loops", [1, 3, 4])
def test_a_draft_stands_from_its_loop_on_and_before_it_nothing_is_said(sequence, place, drafted_at, loops):
    right = int(SETTLED[sequence, place % 3])
    _, stands = asked(sequence, place, LOOPS, drafted_at, loops)
    assert stands == (drafted_at >= right or loops < right)


@pytest.mark.parametrize("stage, token_id", [(0, 10), (LOOPS - 1, 10), (LOOPS, 20), (LOOPS + 2, 20)])
def test_a_token_that_has_left_the_loops_keeps_its_draft(stage, token_id):
    assert asked(0, 0, stage, 1, 2)[0] == token_id


def test_without_a_course_the_models_own_judgement_stays():
    batch = SimpleNamespace(settings=SimpleNamespace(settled=None))
    own = torch.tensor([10]), torch.tensor([True])
    assert judged(batch, None, torch.tensor([0]), *own) == own
