"""Whole steps around their layers in a few launches: those in torch over drawn lanes, and in whole decodes."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sigma0 import ExitConfig
from sigma0.decode import kernel_step, lanes, runner, runners, settings, step
from sigma0.decode.attention import Placement
from sigma0.decode.logits import BROKEN
from sigma0.decode.ops import MODES, TORCH, EndWeights, LoopEndWeights, depth_attention_reference, operations
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.prefill import Batch
from sigma0.decode.sampling import DeviceSampler
from sigma0.decode.sampling_params import SamplingSettings
from sigma0.decode.step import EMITTED, ENDS, FED, whole_step
from sigma0.kernels import exit_state, step_rows
from tests.decode import test_native_runner as native
from tests.decode.test_conformance import written
from tests.kernels.interpreted.conftest import DEVICE
from tests.kernels.interpreted.test_fused_block import GridExecutor, Launches
from tests.marks import slow
from tests.reference import tiny_model

SIZE = 8


class Model(native.Model):
    """Embeds ids as small integers, so that many ids are the likeliest; id 4 as NaN, whose logits are broken."""

    operations = operations("triton", torch.device(DEVICE))

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randint(-2, 3, (150, native.WIDTH), generator=generator).float()
        self.embedding[4] = torch.nan
        self.head = torch.randint(-1, 2, self.embedding.shape, generator=generator).float()

    def enter(self, token_ids, positions):
        return self.embedding[token_ids]

    def loop(self, hidden, rows):
        return hidden.roll(1, -1) + rows.loops(hidden.device)[:, None]

    def loop_end_weights(self):
        return LoopEndWeights(None, 0.0, self.gate_weight[0].to(DEVICE), self.gate_bias.to(DEVICE))

    def plain_weights(self):
        return EndWeights(embedding=self.embedding)


def moved(thing):
    """An object whose tensors are on the device under test."""
    for name, part in vars(thing).items():
        if isinstance(part, torch.Tensor):
            setattr(thing, name, part.to(DEVICE))
    return thing


def drawn(seed, sequences, depth, verify):
    """Twice the same batch of a whole step."""
    generator, both, wanted, program = native.drawn(seed, sequences, depth, verify)
    rules = {name: bool(generator.random() < 0.4) for name in ("gate", "margin", "forced", "drops", "watch", "prompts")}
    wanted.exits = torch.tensor(generator.integers(1, depth + 1, (sequences, 4))) if rules["forced"] else None
    wanted.settled = torch.tensor(generator.integers(1, depth + 1, (sequences, 3))) if rules["forced"] else None
    wanted.thresholds.copy_(torch.tensor(generator.random((sequences, 3))))
    wanted.thresholds[:, settings.THETA] *= 1.0 if rules["margin"] else torch.inf
    ruled = ["none", *(["qexit"] if rules["gate"] else []), *(["converge"] if rules["watch"] else [])]
    wanted.table[:, settings.MODE] = torch.tensor([MODES.index(str(generator.choice(ruled))) for _ in range(sequences)])
    wanted.table[:, settings.BREAK_AFTER] = torch.tensor(generator.integers(0, 2, sequences)) * int(rules["watch"])
    modes = frozenset({"converge"} if rules["watch"] else ())
    program = replace(program, **rules, modes=modes, breaks=rules["watch"], reads_logits=rules["margin"])
    # tokens of a prompt are no drafts
    stage, position = (
        both[0].table[:-1, column].view(sequences, depth) for column in (lanes.STAGE, lanes.CACHE_POSITION)
    )
    oldest = torch.where((stage >= depth) & (stage < 2 * depth), position, settings.NO_LIMIT).amin(1)
    wanted.table[:, settings.PROMPT] = wanted.table[:, settings.PROMPT].minimum(oldest)
    blocks = torch.tensor(generator.permutation(sequences * 4).reshape(sequences, 4))
    paged = bool(generator.random() < 0.5)
    size, total = (SIZE, sequences * 4 * SIZE + 1) if paged else (native.LONGEST, sequences * native.LONGEST + 1)
    place = Placement(size, total, blocks.to(DEVICE) if paged else None)
    model, batches = moved(Model(seed)), []
    kept = torch.tensor(generator.random((2, depth, total, 1, 2))).float()
    for current in both:
        if seed % 3 == 0:
            current.hidden[seed % current.count] = torch.nan
        stage = moved(current).table[:-1, lanes.STAGE]
        current.watch().counts[:-1, 0] = torch.where(stage < depth, stage, 0)
        planes = LayerPlanes(torch.zeros(1, 1, 2), depth, (total - 1) // size, size)
        planes.flat_keys, planes.flat_values = kept.clone()
        batches.append(
            Batch(model, current, moved(wanted), program, [moved(planes)], place, native.LONGEST, model.operations)
        )
    return generator, batches


def told(batch, lines):
    """All that a step leaves, in the rows that say something, but for nobody's."""
    current, planes = batch.lanes, batch.layers[0]
    says = (lines[:-1, EMITTED] | lines[:-1, FED]) > 0
    known = [
        current.table,
        current.hidden,
        current.gate,
        current.paths,
        current.exit_state.counts,
        current.exit_state.gate,
    ]
    kept = [part[:, :-1] for part in (planes.flat_keys, planes.flat_values)]
    return says, [lines[:-1][says], lines[-1], *(part[:-1] for part in known), *kept]


@pytest.mark.cpu(20)
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("seeds", [range(6), *(slow(range(start, start + 20)) for start in range(6, 106, 20))])
def test_steps_are_those_in_torch(seeds, monkeypatch):
    """Drafts that fall, ends, broken logits, every rule, and bounds above the rows; three steps of each draw."""
    ended, fell, broken = 0, 0, 0
    for seed in seeds:
        with torch.device("cpu"):
            generator, batches = drawn(seed, 1 + seed % 4, 1 + seed % 5, seed % 3 > 0)
        current = batches[0].lanes
        sampler = DeviceSampler(SamplingSettings(current.sequences, current.device), torch.zeros(0))
        suspends = bool(generator.random() < 0.5)
        for _ in range(3):
            live = int((current.table[:-1, lanes.STAGE] < current.idle).sum()) + current.sequences
            count, obtained = min(live, current.count), []
            for batch in batches:
                assert kernel_step.knows(batch, sampler.is_greedy)
                with monkeypatch.context() as patch:
                    if batch is batches[0]:
                        patch.setattr(kernel_step, "knows", lambda *_: False)
                    lines, logits = whole_step(batch, count, sampler, suspends=suspends)
                says, parts = told(batch, lines)
                obtained.append([*parts, logits[says[: len(logits)]]])
            for part, (theirs, ours) in enumerate(zip(*obtained, strict=True)):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=f"{seed} {part}")
            lines = obtained[0][0]
            ended, fell = ended + int(lines[:, ENDS].sum()), fell + int((lines[:, step.ACCEPTED] == 0).sum())
            broken += int((lines[:, step.TOKEN] == BROKEN).sum())
    assert ended and fell and broken


@pytest.mark.usefixtures("on_device")
def test_the_kernels_of_a_step_are_those_compiled_ahead(monkeypatch):
    with torch.device("cpu"):
        _, (batch, _) = drawn(4, 2, 3, True)
    started, real = [], step_rows.start

    def start(kernel, grid, like, *arguments, **options):
        kinds = [part.dtype if isinstance(part, torch.Tensor) else part for part in arguments]
        started.append((kernel, grid, kinds, options))
        if runs:
            real(kernel, grid, like, *arguments, **options)

    monkeypatch.setattr(step_rows, "start", start)
    for runs in (False, True):
        if runs:
            kernel_step.run_step(batch, 4, True)
        else:
            kernel_step.compile_kernels(batch, 4, True)
    assert len(started) == 6 and started[:3] == started[3:]


def test_columns_are_those_of_the_decoder():
    for module in (lanes, settings, step, exit_state):
        for name in filter(str.isupper, dir(module)):
            current = getattr(step_rows, f"_{name.lstrip('_')}", None)
            assert current is None or current.value == getattr(module, name), name
    assert step_rows._BROKEN.value == BROKEN
    assert (lanes.SURVIVAL, lanes.CUMULATIVE) == (0, 1)


def decoded(model, config, monkeypatch, backend="triton", **asked):
    """Two texts, and what whole steps of them launched."""
    model.backend = backend
    launched, others, passes = [], Launches(), []
    launch = GridExecutor.__call__

    def counted(executor, *args, **kwargs):
        launched.append(executor.fn.__name__)
        with _disable_current_modes():
            return launch(executor, *args, **kwargs)

    def whole(*given, **kept):
        launched.clear()
        others.count = 0
        with others:
            result = whole_step(*given, **kept)
        passes.append((len(launched), others.count))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(runners, "ASYNC_DEVICES", frozenset({"cpu"}))
        if backend == "torch":
            # attention whose calls depend on no value, as a kernel on a device
            ops = replace(TORCH, depth_attention=depth_attention_reference)
            patch.setattr(type(model), "operations", property(lambda self: ops))
        else:
            patch.setattr(GridExecutor, "__call__", counted)
        patch.setattr(runner, "whole_step", whole)
        return written(model, [[5, 6, 7], [8, 9]], config, 5, runner="eager", **asked), passes


@pytest.mark.skipif(DEVICE != "cpu", reason="a profile counts them there")
@pytest.mark.parametrize(
    ("config", "most"),
    [
        (ExitConfig(mode="full"), 8),
        (ExitConfig(q=0.4), 8),
        (ExitConfig(q=0.4, after_exit="drop"), 9),
        (ExitConfig(mode="margin", theta=0.3, after_exit="verify"), 9),
        slow(ExitConfig(mode="converge", eps=0.2), 8),
        slow(ExitConfig(mode="fixed", depth=2), 8),
        slow(ExitConfig(q=0.4, after_exit="verify"), 8),
        slow(ExitConfig(mode="margin", theta=0.3), 9),
    ],
    ids=lambda value: f"{value.mode}-{value.after_exit}" if isinstance(value, ExitConfig) else "",
)
def test_a_whole_decode_is_that_in_torch_in_few_launches(config, most, monkeypatch):
    """Around the layers, of which each is seven, at most 25 launches are asked for; these are all."""
    model = tiny_model(seed=3, num_hidden_layers=1, total_ut_steps=3)
    plain, _ = decoded(model, config, monkeypatch, "torch")
    kernels, passes = decoded(model, config, monkeypatch)
    assert torch.equal(plain.sequences, kernels.sequences)
    assert torch.equal(plain.exit_depths, kernels.exit_depths) and plain.exit_reasons == kernels.exit_reasons
    assert (plain.loop_passes, plain.loop_rows) == (kernels.loop_passes, kernels.loop_rows) and len(passes) > 3
    assert {launches + others - 7 for launches, others in passes[1:]} == {most}


@pytest.mark.skipif(DEVICE != "cpu", reason="a runner of other devices is asked for")
def test_layers_that_run_as_modules_write_the_same_positions(monkeypatch):
    """Products of libraries, which no kernel that writes K/V stands behind."""
    model, config = tiny_model(seed=3, num_hidden_layers=1, total_ut_steps=3), ExitConfig(q=0.4, after_exit="drop")
    plain, _ = decoded(model, config, monkeypatch, "torch")
    model.deterministic = False
    kernels, passes = decoded(model, config, monkeypatch)
    assert torch.equal(plain.sequences, kernels.sequences) and torch.equal(plain.exit_depths, kernels.exit_depths)
    assert len(passes) > 3
