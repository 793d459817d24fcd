"""What is measured on a GPU, the most important first: a table of data that needs no torch to be read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of random weights: tokens stop at any loop, and drafts are often wrong, which tries the equality hard.
RULE = '{"mode": "qexit", "q": 0.5}'


@dataclass(frozen=True)
class Part:
    """A measurement.

    Attributes:
        name: By which it is asked for.
        says: What it measures.
        seconds: It is expected to take at most, compilation included: estimates.
        function: That measures, as `module:name`.
        arguments: Of the function, by name.
        needs: A package that it needs beside the dependencies; "" for none.
    """

    name: str
    says: str
    seconds: float
    function: str
    arguments: dict[str, Any]
    needs: str = ""


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        device: Where.
        shape: Random weights that all parts share.
        larger: Shapes that are timed at the end.
        equality_shapes: Random weights whose bits are compared.
        equality_passes: Of one text with dependent launch and without.
        runners: Of the step, the most important first.
        contexts: Prompt tokens at batch 1, the first for all that has no other.
        prompts: Prompt tokens of what is read warm.
        new_tokens: New tokens of each sequence.
        rounds: Interleaved.
        engine_context: Prompt tokens of a request.
        concurrency: Requests under way at once.
        kernels: Options of the bench of kernels.
        compiles: Whether transformers' own loop is compiled, and products are tuned.
    """

    device: str
    shape: str
    larger: tuple[str, ...]
    equality_shapes: tuple[str, ...]
    equality_passes: int
    runners: tuple[str, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int
    rounds: int
    engine_context: int
    concurrency: tuple[int, ...]
    kernels: dict[str, Any]
    compiles: bool


DAY = Sizes(
    device="cuda",
    shape="ouro-1.4b",
    larger=("ouro-2.6b",),
    equality_shapes=("ouro-two-layers", "tiny"),
    equality_passes=1000,
    runners=("cudagraph", "compile", "eager"),
    contexts=(512, 4096, 16384),
    prompts=(512, 4096, 16384),
    new_tokens=32,
    rounds=5,
    # what 128 requests write beside their prompts fits a GPU of 80 GB
    engine_context=256,
    concurrency=(1, 8, 32, 128),
    kernels={"rows": "1,4", "contexts": "512,4096", "ways": "kernel,eager"},
    compiles=True,
)
REHEARSAL = Sizes(
    device="cpu",
    shape="tiny",
    larger=(),
    equality_shapes=("tiny",),
    equality_passes=8,
    runners=("eager",),
    contexts=(8,),
    prompts=(8,),
    new_tokens=4,
    rounds=1,
    engine_context=8,
    concurrency=(2,),
    kernels={"rows": "1", "contexts": "16", "whole_pass": False},
    compiles=False,
)


def parts(sizes: Sizes, out: Path) -> tuple[Part, ...]:
    """All measurements, in the order in which they are run.

    Args:
        sizes: How much is measured.
        out: Folder of the results.
    """
    place = {"device": sizes.device, "dtype": "bfloat16"}
    context, first = sizes.contexts[0], sizes.runners[0]
    model = {**place, "shape": sizes.shape}
    ledger = {"out": out / "leaderboard.jsonl", "as_json": True}
    timed = {"new_tokens": sizes.new_tokens, "rounds": sizes.rounds}
    speed = {**model, **timed, **ledger, "prompt_rounds": 1}
    ways, rule = "full,finish,verify,drop", {"ways": "full,verify", "course": "rule", "exit_config": RULE}
    engine = {"by": "engine", "context": sizes.engine_context}

    def timing(name: str, says: str, seconds: float, **arguments: Any) -> Part:
        return Part(name, says, seconds, "sigma0.bench.speed.command:speed", {**speed, **arguments})

    return (
        Part(
            "facts",
            "device, versions, and the bandwidth of a copy",
            10,
            "sigma0.bench.gpu.device:device",
            {"device": sizes.device, "out": out / "device.json", "as_json": True},
        ),
        Part(
            "equality",
            "equal bits of all loops' states under every rule, alone and among 16 rows, with dependent launch or none",
            45,
            "sigma0.bench.gpu.equality:equality",
            {
                "device": sizes.device,
                "shapes": sizes.equality_shapes,
                "passes": sizes.equality_passes,
                "out": out / "equality.json",
            },
        ),
        *(
            timing(
                runner,
                f"{sizes.shape} at batch 1, runner {runner}: {ways} on a stated course",
                {"cudagraph": 15, "compile": 90, "eager": 40}[runner],
                # transformers' own loop is eager
                ways=f"{ways},huggingface" if runner == "eager" else ways,
                runner=runner,
                context=context,
            )
            for runner in sizes.runners
        ),
        Part(
            "profile",
            "kernels, launches and gaps of a pass",
            15,
            "sigma0.bench.gpu.passes:passes",
            {
                **model,
                "runner": first,
                "context": context,
                "new_tokens": sizes.new_tokens,
                "ways": ("full", "finish", "verify"),
                "out": out / "profile.json",
            },
        ),
        Part(
            "kernels",
            "products and other kernels as the table divides them, beside eager torch",
            45,
            "sigma0.bench.kernels.command:kernels",
            {**place, **sizes.kernels, "out": out / "kernels.json", "as_json": True},
        ),
        Part(
            "prompts",
            "tokens a second of a warm prompt and time to the first token, beside transformers' own forward",
            40,
            "sigma0.bench.gpu.prompts:prompts",
            {**model, "contexts": sizes.prompts, "rounds": sizes.rounds, "out": out / "prompts.json"},
        ),
        *(
            timing(f"engine-{n}", f"the server's engine, {n} requests at once", 30, ways=ways, batch=n, **engine)
            for n in sizes.concurrency
        ),
        *(
            timing(f"context-{n}", f"batch 1 at context {n}", 30, ways=ways, runner=first, context=n)
            for n in sizes.contexts[1:]
        ),
        timing("verified", "whether verify writes full depth's text", 20, runner=first, context=context, **rule),
        *(
            timing(
                "static",
                "transformers' own loop compiled, with a static cache",
                90,
                ways="full,huggingface-static",
                runner=first,
                context=context,
            )
            for _ in range(sizes.compiles)
        ),
        Part(
            "int8",
            "int8 weights of the block beside floats",
            60,
            "sigma0.bench.quantization.command:quantization",
            {**model, **timed, **ledger, "to": "int8", "context": context},
            needs="torchao",
        ),
        *(
            timing(shape, f"{shape} at batch 1", 45, shape=shape, ways=ways, runner=first, context=context)
            for shape in sizes.larger
        ),
        *(
            Part(
                "tune",
                "the best tiling of each product, as a table",
                120,
                "sigma0.bench.kernels.command:kernels",
                {**place, "tune": True, "shape": sizes.shape, "out": out / "products.json", "as_json": True},
            )
            for _ in range(sizes.compiles)
        ),
    )


def named(every: Sequence[Part], names: str) -> list[Part]:
    """Parts by their names.

    Args:
        every: All parts.
        names: Parted by commas; "" for all.

    Raises:
        ValueError: For a name that no part has.
    """
    if not names:
        return list(every)
    by_name = {part.name: part for part in every}
    wanted = names.split(",")
    unknown = sorted(set(wanted) - set(by_name))
    if unknown:
        raise ValueError(f"no such part: {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in wanted]
