"""From a promised agreement to the fewest bits of K/V that keep it: `sigma0 calibrate --objective kv`.

The unit is a prompt. Its loss under a codec is the share of new tokens whose argmax at full depth is another one than
without a codec, read under teacher forcing along full depth's own greedy continuation. Codecs are tested from many
bits to few by `sigma0.calibrate.ltt`, so the smallest that passed keeps the agreement with the confidence asked for.
What exits do comes on top: `verify` under a codec equals full depth under the same codec.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigma0.calibrate.agreement import check_distinct, continue_in_full, held_out, prompts_needed
from sigma0.calibrate.bootstrap import Estimate, clustered_share
from sigma0.calibrate.ltt import p_value, passing
from sigma0.calibrate.teacher_forcing import ForcedText, check_finite
from sigma0.config import ExitConfig, KVConfig
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.kv_store import BlockShape
from sigma0.models.hf_generate import DepthGenerationMixin

_FULL = ExitConfig(mode="full")
_SEED = 0


def codecs_of(shape: BlockShape, segment: int = KVConfig().segment) -> list[KVConfig]:
    """Codecs for a model, from many bits a number to few: the order of the tests.

    Args:
        shape: Of a block of its K/V.
        segment: Cache positions that are encoded together.
    """
    loops, early = shape.planes, shape.planes // 2
    result = [
        KVConfig(codec="int8", segment=segment),
        KVConfig(codec="int4", segment=segment),
        KVConfig(codec="int4", group=32, segment=segment),
        KVConfig(codec="residual", bits=(4,) * early + (2,) * (loops - 1 - early) + (4,), segment=segment),
        KVConfig(codec="residual", bits=(2,) * (loops - 1) + (8,), segment=segment),
        KVConfig(codec="residual", segment=segment),
        KVConfig(codec="residual", group=32, segment=segment),
        KVConfig(codec="residual", bits=(1,) * (loops - 1) + (4,), group=32, segment=segment),
        KVConfig(codec="residual", bits=(1,) * (loops - 1) + (2,), group=32, segment=segment),
        KVConfig(codec="residual", bits=(1,) * loops, group=32, segment=segment),
    ]
    return sorted(dict.fromkeys(result), key=lambda kv: -shape.number_bits(kv))


def coded_share(text: ForcedText, segment: int) -> float:
    """Share of the positions that the new tokens of a text are read over which are in few bits."""
    positions = np.arange(len(text.ids) - 1 - text.new, len(text.ids) - 1)
    return float((positions // segment * segment).sum() / (positions + 1).sum())


@torch.no_grad()
def read_coded(model: DepthGenerationMixin, text: ForcedText, kv: KVConfig, config: ExitConfig = _FULL) -> Tensor:
    """Logits `[new, V]` of a given continuation, read over K/V in a codec.

    Args:
        model: A looped model.
        text: Prompt and continuation.
        kv: How K/V are stored.
        config: When tokens stop.
    """
    cache = DepthCache(model.num_block_layers, model.num_loops, len(text.ids), model.stages, kv)
    ids = torch.tensor([text.ids[:-1]], device=model.device)
    read = model(ids, past_key_values=cache, exit_config=config, logits_to_keep=text.new)
    return check_finite(read.logits[0], model.num_loops)


@dataclass(frozen=True)
class TestedCodec:
    """A codec on the calibration prompts."""

    kv: KVConfig  # The codec
    number_bits: float  # Bits of a number of K/V
    agreement: float  # 1 minus the mean loss
    p_value: float  # Of "the agreement is below the one asked for"
    passed: bool  # Whether it keeps the promise


@dataclass(frozen=True)
class KVCalibration:
    """What was found."""

    agreement: float  # The agreement asked for
    confidence: float  # With which it was to be kept
    prompts: int  # Calibration prompts
    needed: tuple[int, int]  # As `sigma0.calibrate.agreement.Calibration` has it
    coded_share: float  # Share of what the new tokens were read over that was in few bits
    tested: tuple[TestedCodec, ...]  # From many bits on, down to the first that did not pass
    chosen: KVConfig | None  # The one with the fewest bits that passed, or None
    checked: int  # Prompts that had no part in the choice
    check: Estimate | None  # Agreement of the chosen one on those, or None


def calibrate_kv(
    model: DepthGenerationMixin,
    prompts: Sequence[tuple[int, ...]],
    agreement: float = 0.99,
    confidence: float = 0.95,
    max_new_tokens: int = 64,
    segment: int = KVConfig().segment,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> KVCalibration:
    """Chooses the codec with the fewest bits whose agreement is kept with the confidence asked for.

    Args:
        model: A looped model.
        prompts: Ids of prompts; every fifth, after shuffling, is set apart for the check.
        agreement: Share of new tokens that must keep the argmax of K/V as computed, in (0, 1).
        confidence: In (0, 1).
        max_new_tokens: New tokens of each prompt at most.
        segment: Cache positions that are encoded together.
        on_prompt: Told how many prompts are done; there are `len(prompts)`.

    Raises:
        ValueError: For too few prompts, two that are the same, a share out of range, or prompts that end within their
            first segment, of which nothing would be stored in few bits.
    """
    needed = prompts_needed(agreement, confidence)
    if len(prompts) < needed[0]:
        raise ValueError(
            f"{len(prompts)} prompts cannot promise agreement >= {agreement:g} with confidence {confidence:g}: it "
            f"takes {needed[0]} without one error; give more prompts, or ask for less"
        )
    check_distinct(prompts)
    order = list(range(len(prompts)))
    Random(_SEED).shuffle(order)
    apart = held_out(len(prompts))
    texts = continue_in_full(model, [prompts[k] for k in order], max_new_tokens)
    share = float(np.mean([coded_share(text, segment) for text in texts]))
    if not share:
        raise ValueError(
            f"every text ends within its first segment of {segment} tokens, of which nothing is stored in few bits: "
            "give longer prompts, or a smaller --segment"
        )
    shape = BlockShape.of(model, 1)
    codecs = codecs_of(shape, segment)
    risk = 1 - agreement
    losses: NDArray[np.float64] = np.ones((len(texts) - apart, len(codecs)))
    tested: list[TestedCodec] = []
    for number, kv in enumerate(codecs):
        for row, text in enumerate(texts[apart:]):
            losses[row, number] = _loss(model, text, kv)
            on_prompt(number * len(losses) + row + 1)
        mean = float(losses[:, number].mean())
        passed = passing(losses[:, : number + 1], risk, confidence) > number
        bits = shape.number_bits(kv)
        tested.append(TestedCodec(kv, bits, 1 - mean, p_value(mean, len(losses), risk), passed))
        if not passed:
            break
    chosen = next((item.kv for item in reversed(tested) if item.passed), None)
    check = None
    if chosen is not None:
        counts = [round((1 - _loss(model, text, chosen)) * text.new) for text in texts[:apart]]
        check = clustered_share(counts, [text.new for text in texts[:apart]])
    return KVCalibration(agreement, confidence, len(losses), needed, share, tuple(tested), chosen, apart, check)


def _loss(model: DepthGenerationMixin, text: ForcedText, kv: KVConfig) -> float:
    result = read_coded(model, text, kv).argmax(-1)
    output = torch.tensor(text.ids[-text.new :], device=result.device)
    return float((result != output).double().mean())
