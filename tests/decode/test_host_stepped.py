"""What only Python knows: processors and criteria, called for rows of one length, and watched for state."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from sigma0.decode.python_hooks import (
    ROW_WISE_CRITERIA,
    ROW_WISE_PROCESSORS,
    CheckedProcessors,
    StateGuard,
    criteria_met,
    narrowed,
    process_rows,
    rows_are_independent,
    split_criteria,
)

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])


def ints(*values):
    return np.array(values, dtype=np.int64)


class Seen(LogitsProcessor):
    """Writes the ids that it sees over the scores, in place."""

    def __init__(self):
        self.calls = []

    def __call__(self, ids, scores):
        self.calls.append(ids.tolist())
        scores[:, 0] = ids.sum(-1)
        return scores


def test_processors_see_rows_of_one_length_at_a_time():
    seen, logits = Seen(), torch.zeros(4, 2)
    logits[:, 1] = torch.arange(4.0)
    scores = process_rows(LogitsProcessorList([seen]), IDS, ints(2, 0, 1, 0), ints(2, 3, 2, 1), logits)
    assert seen.calls == [[[1]], [[9, 10], [5, 6]], [[1, 2, 3]]]
    assert scores.tolist() == [[19, 0], [6, 1], [11, 2], [1, 3]] and not logits[:, 0].any()


def test_criteria_see_rows_of_one_length_and_the_scores_that_are_kept():
    calls = []

    def ends(ids, scores, **_):
        calls.append((ids.tolist(), None if scores is None else [step.tolist() for step in scores]))
        return ids[:, -1] > 6

    kept = [[torch.tensor([10.0 * row + step]) for step in range(3)] for row in range(3)]
    given = StoppingCriteriaList([ends]), IDS, ints(2, 0, 1), ints(2, 3, 2)
    assert criteria_met(*given, kept).tolist() == [True, False, False]
    assert calls[0] == ([[9, 10], [5, 6]], [[[20.0], [10.0]], [[21.0], [11.0]], [[22.0], [12.0]]])
    assert calls[1][0] == [[1, 2, 3]]
    calls.clear()
    assert criteria_met(*given, None).tolist() == [True, False, False] and calls[0][1] is None


def test_lengths_and_ends_need_no_call():
    other = criteria.MaxTimeCriteria(5.0)
    eos = [criteria.EosTokenCriteria([3, 4]), criteria.EosTokenCriteria(5)]
    lengths = [criteria.MaxLengthCriteria(9), criteria.MaxLengthCriteria(7)]
    rest, most, ends = split_criteria(StoppingCriteriaList([*lengths, other, *eos]))
    assert (list(rest), most, ends) == ([other], 7, {3, 4, 5})
    assert split_criteria(StoppingCriteriaList()) == (StoppingCriteriaList(), None, frozenset())

    class Own(criteria.MaxLengthCriteria):
        pass

    current = Own(5)
    assert split_criteria(StoppingCriteriaList([current])) == (StoppingCriteriaList([current]), None, frozenset())


def test_what_is_known_to_treat_each_row_by_itself():
    known = LogitsProcessorList([processors.TopKLogitsWarper(3)]), StoppingCriteriaList([criteria.MaxLengthCriteria(3)])
    assert rows_are_independent(*known) and rows_are_independent(LogitsProcessorList(), StoppingCriteriaList())
    assert not rows_are_independent(LogitsProcessorList([*known[0], Seen()]), known[1])
    assert not rows_are_independent(known[0], StoppingCriteriaList([*known[1], lambda ids, scores: False]))
    assert processors.PrefixConstrainedLogitsProcessor not in ROW_WISE_PROCESSORS and len(ROW_WISE_CRITERIA) == 4


def test_processors_of_some_rows():
    penalty = processors.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([0, 1, 2]))
    prefix = processors.PrefixConstrainedLogitsProcessor(lambda row, ids: [row], 1)
    top = processors.TopKLogitsWarper(3)
    few = narrowed(LogitsProcessorList([penalty, prefix, top]), ints(2, 0))
    assert few[0].prompt_ignore_length.tolist() == [2, 0] and few[1] is prefix and few[2] is top
    assert penalty.prompt_ignore_length.tolist() == [0, 1, 2] and few[0].penalty == 1.5
    one = narrowed(LogitsProcessorList([prefix]), ints(2))
    assert one[0] is not prefix and prefix._prefix_allowed_tokens_fn(7, None) == [7]
    scores = one(IDS[:1], torch.zeros(1, 4))
    assert scores.isfinite().tolist() == [[False, False, True, False]]


def test_a_processor_that_leaves_nothing_is_named():
    def forbid(ids, scores):
        scores[1] = -torch.inf
        return scores

    def divide(ids, scores):
        return scores / scores[:1]

    temperature, logits = processors.TemperatureLogitsWarper(0.5), torch.arange(8.0).view(2, 4)
    for fault, name in ((forbid, "forbid"), (divide, "divide")):
        with pytest.raises(ValueError, match=f"{name} leaves no token"):
            CheckedProcessors([temperature, fault])(IDS, logits.clone())
    # a row that is broken before is not the processor's fault; infinite scores are a choice
    broken = logits.index_fill(0, torch.tensor([1]), torch.nan)
    assert CheckedProcessors([temperature])(IDS, broken)[1].isnan().all()
    assert CheckedProcessors([temperature])(IDS, logits + torch.tensor([torch.inf, 0, 0, 0]))[0, 0] == torch.inf


class Holder:
    def __init__(self, held):
        self.held = held

    def __call__(self, change):
        change(self.held)


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


class OneSlot:
    __slots__ = "value"


def nested(depth, inner):
    for _ in range(depth):
        inner = [inner]
    return inner


CHANGES = {
    "list": ([1], lambda held: held.append(2)),
    "order": ([1, 2], lambda held: held.reverse()),
    "tuple of lists": (([1], 2), lambda held: held[0].append(2)),
    "dict": ({1: 2}, lambda held: held.update({1: 3})),
    "key": ({1: 2}, lambda held: held.update({3: held.pop(1)})),
    "set": ({1}, lambda held: held.add(2)),
    "deque": (deque([1]), lambda held: held.append(2)),
    "array": (np.zeros(3), lambda held: held.__setitem__(1, 1.0)),
    "tensor": (torch.zeros(3), lambda held: held.add_(1)),
    "slot": (Slotted(), lambda held: setattr(held, "value", 1)),
    "one slot": (OneSlot(), lambda held: setattr(held, "value", 1)),
    "attribute": (SimpleNamespace(a=SimpleNamespace(b=1)), lambda held: setattr(held.a, "b", 2)),
    "deep": (nested(3, [1]), lambda held: held[0][0][0].append(2)),
}


def check_noticed(item, keeps, changes, name="Holder"):
    """The first call is passed over, and the second is not."""
    guard = StateGuard([item])
    with guard.watching(item):
        item(keeps)
    with pytest.raises(ValueError, match=f"{name} keeps state between calls"), guard.watching(item):
        item(changes)


@pytest.mark.parametrize("name", CHANGES)
def test_state_between_calls_is_noticed(name):
    held, change = CHANGES[name]
    check_noticed(Holder(held), lambda held: None, change)


def test_what_holds_itself_is_looked_at_some_levels_deep():
    item = Holder({})
    item.held["own"], item.more = item, [item]
    check_noticed(item, len, lambda held: held.update({"new": 1}))


def test_state_of_a_function_is_in_its_closure_and_of_a_method_in_its_object():
    count = [0]

    def counts(step):
        count[0] += step

    check_noticed(counts, 0, 1, "counts")
    check_noticed(Holder([1]).__call__, len, lambda held: held.append(2), "__call__")


def test_a_tensor_of_inference_mode_is_compared_by_its_numbers():
    with torch.inference_mode():
        check_noticed(Holder(torch.zeros(2)), lambda held: held.sum(), lambda held: held.add_(1))


def test_what_is_known_to_keep_no_state_is_not_watched():
    top = processors.TopKLogitsWarper(3)
    guard = StateGuard([top, criteria.MaxLengthCriteria(3)])
    with guard.watching(top):
        top.top_k = 4
    item = Holder([1])
    with guard.watching(item):
        item(lambda held: held.append(2))
