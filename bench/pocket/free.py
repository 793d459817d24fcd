"""Free generation at the checkpoint's own exit settings, beside full depth: what was really saved, and what it cost."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from sigma0.api import generate
from sigma0.bench.pocket.data import chat_messages
from sigma0.bench.pocket.world import MIX, Mix, draw
from sigma0.config import ExitConfig
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.signals.generation import Generation

_LONGEST = 24


@dataclass(frozen=True)
class FreeRuns:
    """Answers to n held-out questions, one at a time.

    Attributes:
        n: Questions.
        same: Share of answers equal to full depth's, token for token.
        right: Share of answers that are right, at the exits.
        right_at_full_depth: The same at full depth.
        depth_saved: Over all answers, the tokens after each one's first: 1 - sum of exit depths / (T tokens).
        passes_saved: 1 - passes / (T tokens), both summed over the runs.
        rows_saved: 1 - rows / (T tokens), both summed over the runs.
    """

    n: int
    same: float
    right: float
    right_at_full_depth: float
    depth_saved: float
    passes_saved: float
    rows_saved: float


def free_runs(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    n: int,
    split: str,
    seed: int,
    exit_config: ExitConfig | None = None,
    mix: Mix = MIX,
) -> FreeRuns:
    """Asks one question about each of n stories, every other one as chat, at the exits and at full depth.

    Args:
        model: A looped model with exit settings of its own.
        tokenizer: Its tokenizer.
        n: Questions, at least 1.
        split: `train`, `calibration` or `test`.
        seed: Seed of the stories.
        exit_config: The rule; by default the checkpoint's own.
        mix: What is drawn how often.
    """
    exits: list[Generation] = []
    same = right = right_full = 0
    for index in range(n):
        item = draw(split, seed, index, questions=1, mix=mix).items[0]
        prompt = chat_messages([item])[:1] if index % 2 else item.prompt
        early = generate(
            model, tokenizer, prompt, max_new_tokens=_LONGEST, exit_config=exit_config, on_collapse="ignore"
        )
        full = generate(
            model, tokenizer, prompt, max_new_tokens=_LONGEST, exit_config=ExitConfig(mode="full"), on_collapse="ignore"
        )
        exits.append(early)
        same += [token.id for token in early.tokens] == [token.id for token in full.tokens]
        right += early.text.strip() == item.answer
        right_full += full.text.strip() == item.answer
    full_depth = model.num_loops * sum(len(run.tokens) - 1 for run in exits)
    return FreeRuns(
        n=n,
        same=same / n,
        right=right / n,
        right_at_full_depth=right_full / n,
        depth_saved=1 - sum(token.depth for run in exits for token in run.tokens[1:]) / full_depth,
        passes_saved=1 - sum(run.loop_passes for run in exits) / full_depth,
        rows_saved=1 - sum(run.loop_rows for run in exits) / full_depth,
    )
