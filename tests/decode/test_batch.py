"""A batch of sequences without a server: plain values in, lines out, whatever becomes of a sequence in between."""

import pytest
import torch

from sigma0.config import ExitConfig
from sigma0.decode.batch import RunningBatch
from sigma0.decode.kv_store import BlockShape, PagedPlanes
from sigma0.decode.sampling_params import SequenceSampling
from sigma0.decode.sequences import Asked
from sigma0.decode.settings import SequenceExit
from sigma0.decode.step import EMITTED, ENDS, FED_AT, FRESH, READ_AT, SEQUENCE, TOKEN

PROMPTS = [[3, 5, 7, 11, 2], [8, 8, 1]]
NEW, LONGEST = 9, 32


def asked(model, key, config, sampling):
    verify, drop = (config.after_exit == name for name in ("verify", "drop"))
    prompt = SequenceExit(model.exit_rule(config), drop, verify, len(PROMPTS[key]), prompt_in_lanes=True)
    return Asked(key, prompt, NEW, [], sampling)


def run(model, config, samplings, preempted_after=None, counts=None):
    """New ids of both sequences; the first loses its slot after so many passes, and gets another one."""
    planes = PagedPlanes(BlockShape.of(model, 4), 24, model.dtype, model.device, 3, LONGEST)
    batch = RunningBatch(model, planes, 3, LONGEST, None)
    ids, new, depths = [list(prompt) for prompt in PROMPTS], [[], []], [[], []]
    for slot, prompt in enumerate(PROMPTS):
        planes.place(slot, range(8 * slot, 8 * slot + 8))
        batch.admit(slot, asked(model, slot, config, samplings[slot]), prompt)
        batch.enter([(slot, 0, prompt)])
    passes = 0
    while len(batch):
        if passes == preempted_after:
            suspended = batch.preempt(0, depths[0])
            planes.place(2, range(16, 24))
            batch.admit(2, asked(model, 0, config, samplings[0]), ids[0], suspended=suspended)
            end = len(PROMPTS[0]) if suspended is None else suspended.end
            for start in range(0, end, 3):
                batch.enter([(2, start, ids[0][start : min(start + 3, end)])])
        batch.resume()
        lines = batch.run().step.lines.tolist()
        passes += 1
        for line in lines:
            slot = line[SEQUENCE]
            key = batch.asked_of(slot).key
            if line[FRESH] and not line[ENDS]:
                ids[key][line[FED_AT] :] = [line[TOKEN]]
            if line[EMITTED]:
                new[key].append(line[TOKEN])
                depths[key].append(line[READ_AT])
            if line[EMITTED] and line[ENDS]:
                batch.remove(slot)
    if counts is not None:
        counts.append(batch.counts.prompt_rows)
    return new


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_sequences_get_what_they_get_alone(tiny, after_exit):
    config, greedy = ExitConfig(q=0.5, after_exit=after_exit), SequenceSampling()
    expected = []
    for prompt in PROMPTS:
        out = tiny.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                            exit_config=config)  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    for preempted_after in (None, 1, 4, 8):
        assert run(tiny, config, [greedy] * 2, preempted_after) == expected


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_draws_and_penalties_survive_a_preemption(tiny, after_exit):
    config = ExitConfig(q=0.5, after_exit=after_exit)
    drawn = [SequenceSampling(True, 7, temperature=1.5), SequenceSampling(True, 8, repetition_penalty=1.4, top_k=9)]
    expected = run(tiny, config, drawn)
    assert len({*expected[0]}) > 2
    for preempted_after in (2, 6):
        assert run(tiny, config, drawn, preempted_after) == expected


@pytest.mark.parametrize("config, loops", [
    (ExitConfig(mode="fixed", depth=2), 2), (ExitConfig(mode="fixed", depth=2, after_exit="verify"), 3),
    (ExitConfig(q=0.5), 3),
])  # fmt: skip
def test_a_prompt_runs_as_many_loops_as_its_tokens_may(tiny, config, loops):
    counts = []
    run(tiny, config, [SequenceSampling()] * 2, counts=counts)
    # the last token of a prompt runs in a lane
    assert tiny.num_loops == 3 and counts == [loops * sum(len(prompt) - 1 for prompt in PROMPTS)]
