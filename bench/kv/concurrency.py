"""How many sequences an engine runs side by side in a given memory before it has to preempt one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sigma0.bench.kv.measure import stored_in
from sigma0.config import FULL_KV, KVConfig
from sigma0.decode.kv_store import BlockShape
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput

# Sequences that the memory is made for, with K/V as computed.
COMPUTED = 4
NEW_TOKENS = 16
# Answers that are compared with those given alone.
COMPARED = 4


@dataclass(frozen=True)
class Load:
    """Requests of like length, and the memory that they share.

    Attributes:
        requests: More than will fit.
        kv_bytes: The memory.
    """

    requests: Sequence[EngineRequest]
    kv_bytes: int

    @classmethod
    def of(cls, model: Any, prompts: Sequence[tuple[int, ...]]) -> "Load":
        """Of prompts; the memory holds `COMPUTED` of them as computed, and nothing else.

        Raises:
            ValueError: For no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to run side by side")
        config = model.resolve_exit_config(None)
        requests = [EngineRequest(prompt, NEW_TOKENS, config, on_collapse="ignore") for prompt in prompts]
        shape = BlockShape.of(model, EngineLimits().page_size)
        # a token to come has its block before it is fed, and each other sequence one to spare
        blocks = -(-(max(map(len, prompts)) + NEW_TOKENS + 1) // shape.size) + 1
        return cls(requests, COMPUTED * blocks * shape.bytes_with(model.dtype))


def run_load(
    model: Any, tokenizer: Any, kv: KVConfig, load: Load, on_step: Callable[[], None] = lambda: None
) -> tuple[int, list[tuple[int, ...]]]:
    """Runs a load under a codec.

    Returns:
        Most sequences that ran at once before the first preemption, and the answer of each request.
    """
    with stored_in(model, kv):
        count = len(load.requests)
        engine = Engine(model, tokenizer, "kv", EngineLimits(count, count, kv_bytes=load.kv_bytes))
        keys = [engine.submit(request) for request in load.requests]
        most, answers = 0, {}
        while engine.has_work:
            for key, event in engine.step():
                if isinstance(event, RequestOutput):
                    answers[key] = tuple(token.id for token in event.tokens)
            if not engine.status().preemptions:
                most = max(most, engine.status().running)
            on_step()
    return most, [answers[key] for key in keys]


def side_by_side(
    model: Any, tokenizer: Any, codecs: Sequence[KVConfig], prompts: Sequence[tuple[int, ...]]
) -> list[dict[str, int]]:
    """Fields about an engine of each codec's row; all of them share one memory."""
    load = Load.of(model, prompts)
    computed, _ = run_load(model, tokenizer, FULL_KV, load)
    found = []
    for kv in codecs:
        most, answers = run_load(model, tokenizer, kv, load)
        alone = [run_load(model, tokenizer, kv, Load([each], load.kv_bytes))[1][0] for each in load.requests[:COMPARED]]
        found.append(
            {
                "kv_memory": load.kv_bytes,
                "concurrent_tokens": max(map(len, prompts)) + NEW_TOKENS,
                "concurrent": most,
                "concurrent_computed": computed,
                "compared_alone": len(alone),
                "same_alone": sum(own == other for own, other in zip(alone, answers[: len(alone)], strict=True)),
            }
        )
    return found
