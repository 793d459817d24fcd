"""The parts of a day on a GPU: what each runs, as a table of data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Seconds that a part may take.
PART_SECONDS = 480
WAYS = ("full", "never", "finish", "drop", "verify")
# Of random weights: tokens stop at any loop, and drafts are often wrong, which tries the equality hard.
RULE = '{"mode": "qexit", "q": 0.5}'


@dataclass(frozen=True)
class Command:
    """A program that a part runs, in a process of its own.

    Attributes:
        name: Within its part.
        module: That Python runs.
        arguments: Of the module.
    """

    name: str
    module: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Programs that are run in turn.

    Attributes:
        name: By which it is asked for.
        says: What it measures.
        commands: Its programs.
        needs: A package that it needs beside the dependencies; "" for none.
        files: Files and folders that must be there.
    """

    name: str
    says: str
    commands: tuple[Command, ...]
    needs: str = ""
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """What a day measures.

    Attributes:
        device: Where.
        dtype: Of weights and K/V.
        shapes: Random checkpoints by the name that their parts have.
        runners: Of the step.
        contexts: Prompt tokens at batch 1.
        new_tokens: New tokens of each sequence.
        rounds: Interleaved.
        kernel_rows: Rows of a pass of which kernels are timed.
        kernel_options: Of that bench.
        engine_shape: Of what the engine serves.
        engine_context: Prompt tokens of a request.
        concurrency: Requests under way at once.
        quantizations: Of the block's weights.
    """

    device: str
    dtype: str
    shapes: tuple[tuple[str, str], ...]
    runners: tuple[str, ...]
    contexts: tuple[int, ...]
    new_tokens: int
    rounds: int
    kernel_rows: tuple[int, ...]
    kernel_options: tuple[str, ...]
    engine_shape: str
    engine_context: int
    concurrency: tuple[int, ...]
    quantizations: tuple[str, ...]


DAY = Sizes(
    device="cuda",
    dtype="bfloat16",
    shapes=(("1.4b", "ouro-1.4b"), ("2.6b", "ouro-2.6b")),
    runners=("eager", "cudagraph", "compile"),
    contexts=(512, 4096, 16384),
    new_tokens=32,
    rounds=5,
    kernel_rows=(1, 4, 16, 64),
    kernel_options=("--contexts", "512,4096,16384"),
    engine_shape="ouro-1.4b",
    # what 128 requests write beside their prompts fits a GPU of 80 GB
    engine_context=256,
    concurrency=(1, 8, 32, 128),
    quantizations=("int8", "int4"),
)
REHEARSAL = Sizes(
    device="cpu",
    dtype="bfloat16",
    shapes=(("1.4b", "tiny"),),
    runners=("eager",),
    contexts=(8,),
    new_tokens=4,
    rounds=1,
    kernel_rows=(1,),
    kernel_options=("--contexts", "16", "--no-whole-pass"),
    engine_shape="tiny",
    engine_context=8,
    concurrency=(2,),
    quantizations=("int8",),
)


def parts(sizes: Sizes, out: Path, tests: Path) -> tuple[Part, ...]:
    """All parts of a day, in the order in which they are best run.

    Args:
        sizes: What is measured.
        out: Folder of the results.
        tests: Folder of the tests.
    """
    place = ("--device", sizes.device, "--dtype", sizes.dtype)
    ledger = ("--out", str(out / "leaderboard.jsonl"))
    decoding = ("--new-tokens", str(sizes.new_tokens), "--rounds", str(sizes.rounds))
    speed = ("speed", *place, *decoding, "--prompt-rounds", "1", *ledger)
    replayed = (*speed, "--ways", ",".join(WAYS))
    judged = (*speed, "--ways", "full,verify", "--course", "rule", "--exit-config", RULE)
    engine = ("--shape", sizes.engine_shape, "--by", "engine", "--context", str(sizes.engine_context))
    kernels = tests / "kernels"
    return (
        Part(
            "facts",
            "device, versions, and the bandwidth of a copy",
            (_bench("device", "device", "--device", sizes.device, "--out", str(out / "device.json")),),
        ),
        Part(
            "tests",
            "the kernels on the GPU against their references",
            (Command("pytest", "pytest", ("-m", "gpu", "-p", "no:cacheprovider", str(kernels))),),
            needs="pytest",
            files=(kernels,),
        ),
        Part(
            "kernels",
            "kernels beside eager torch and torch.compile, and their bytes a second",
            tuple(
                _bench(
                    f"rows-{rows}",
                    "kernels",
                    *place,
                    "--rows",
                    str(rows),
                    *sizes.kernel_options,
                    "--out",
                    str(out / f"kernels-{rows}.json"),
                )
                for rows in sizes.kernel_rows
            ),
        ),
        *(
            Part(
                f"{name}-{runner}",
                f"{shape} at batch 1, runner {runner}: a stated course, and whether verify writes what full depth does",
                tuple(
                    _bench(f"{told}-{context}", *asked, "--shape", shape, "--runner", runner, "--context", str(context))
                    for context in sizes.contexts
                    for told, asked in (("course", replayed), ("equality", judged))
                ),
            )
            for name, shape in sizes.shapes
            for runner in sizes.runners
        ),
        Part(
            "engine",
            f"the server's engine on {sizes.engine_shape} with many requests at once",
            (
                *(_bench(f"requests-{n}", *replayed, *engine, "--batch", str(n)) for n in sizes.concurrency),
                _bench("equality", *judged, *engine, "--batch", str(sizes.concurrency[:2][-1])),
            ),
        ),
        Part(
            "quantization",
            "int8 and int4 weights of the block beside floats",
            tuple(
                _bench(
                    f"{shape}-{kind}",
                    "quantization",
                    *place,
                    *decoding,
                    *ledger,
                    "--shape",
                    shape,
                    "--to",
                    kind,
                    "--context",
                    str(sizes.contexts[0]),
                )
                for _, shape in sizes.shapes
                for kind in sizes.quantizations
            ),
            needs="torchao",
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


def _bench(name: str, *arguments: str) -> Command:
    return Command(name, "sigma0.bench", arguments)
