"""What is measured on a GPU, the most important first, and how it ended: data that needs no torch to be read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigma0.bench.core.lines import alone, append

# Of random weights: tokens stop at any loop, and drafts are often wrong, which tries the equality hard.
RULE = '{"mode": "qexit", "q": 0.5}'


@dataclass(frozen=True)
class Part:
    """A measurement."""

    name: str  # By which it is asked for
    says: str  # What it measures
    seconds: float  # It is expected to take at most, compilation included: estimates
    function: str  # That measures, as `module:name`
    arguments: dict[str, Any]  # Of the function, by name
    needs: str = ""  # A package that it needs beside the dependencies; "" for none


DAY: dict[str, Any] = {
    "device": "cuda",
    # random weights that all parts share
    "shape": "ouro-1.4b",
    # shapes that are timed at the end
    "larger": ("ouro-2.6b",),
    "equality_shapes": ("ouro-two-layers", "tiny"),
    # of one text with dependent launch and without
    "equality_passes": 1000,
    # the most important first
    "runners": ("cudagraph", "compile", "eager"),
    # prompt tokens at batch 1, the first for all that has no other; and of what is read warm
    "contexts": (512, 4096, 16384),
    "new_tokens": 32,
    "rounds": 5,
    # prompt tokens of a request: what 128 requests write beside their prompts fits a GPU of 80 GB
    "engine_context": 256,
    "concurrency": (1, 8, 32, 128),
    "kernels": {"rows": "1,4", "contexts": "512,4096", "ways": "kernel,eager"},
    # whether transformers' own loop is compiled, and products are tuned
    "compiles": True,
}
REHEARSAL: dict[str, Any] = {
    "device": "cpu",
    "shape": "tiny",
    "larger": (),
    "equality_shapes": ("tiny",),
    "equality_passes": 8,
    "runners": ("eager",),
    "contexts": (8,),
    "new_tokens": 4,
    "rounds": 1,
    "engine_context": 8,
    "concurrency": (2,),
    "kernels": {"rows": "1", "contexts": "16", "whole_pass": False},
    "compiles": False,
}


def parts(sizes: dict[str, Any], out: Path) -> list[Part]:
    """All measurements, in the order in which they are run, of the sizes `DAY` or `REHEARSAL`; results lie in `out`."""
    shape, (context, *longer), first = sizes["shape"], sizes["contexts"], sizes["runners"][0]
    place: dict[str, Any] = {"device": sizes["device"], "dtype": "bfloat16"}
    output: dict[str, Any] = {"as_json": True}
    model = {**place, "shape": shape}
    timed = {"new_tokens": sizes["new_tokens"], "rounds": sizes["rounds"], "out": out / "leaderboard.jsonl", **output}
    ways, rule = "full,finish,verify,drop", {"ways": "full,verify", "course": "rule", "exit_config": RULE}
    seconds = {"cudagraph": 15, "compile": 90, "eager": 40}
    # transformers' own loop is eager
    peers = {"eager": ",huggingface"}

    def part(name: str, says: str, seconds: float, function: str, needs: str = "", **arguments: Any) -> Part:
        return Part(name, says, seconds, f"sigma0.bench.{function}", arguments, needs)

    def timing(name: str, says: str, seconds: float, **arguments: Any) -> Part:
        settings = {**model, **timed, "prompt_rounds": 1, "ways": ways, "runner": first, "context": context}
        return part(name, says, seconds, "speed.command:speed", **{**settings, **arguments})

    facts = {"device": sizes["device"], "out": out / "device.json", **output}
    bits = {"shapes": sizes["equality_shapes"], "passes": sizes["equality_passes"], "out": out / "equality.json"}
    profiled = {"runner": first, "context": context, "new_tokens": sizes["new_tokens"], "out": out / "profile.json"}
    profiled |= {"ways": ("full", "finish", "verify")}
    products = "products and other kernels as the table divides them, beside eager torch"
    kernels = {**sizes["kernels"], "out": out / "kernels.json", **output}
    prompts = "tokens a second of a warm prompt and time to the first token, beside transformers' own forward"
    warm = {"contexts": sizes["contexts"], "rounds": sizes["rounds"], "out": out / "prompts.json"}
    engine = {"by": "engine", "runner": "auto", "context": sizes["engine_context"]}
    tuned = {"tune": True, "shape": shape, "out": out / "products.json", **output}
    equal = "equal bits of all loops' states under every rule, alone and among 16 rows, with dependent launch or none"
    every = [
        part("facts", "device, versions, and the bandwidth of a copy", 10, "gpu.device:device", **facts),
        part("equality", equal, 45, "gpu.equality:equality", device=sizes["device"], **bits),
    ]
    for runner in sizes["runners"]:
        says = f"{shape} at batch 1, runner {runner}: {ways} on a stated course"
        every.append(timing(runner, says, seconds[runner], ways=ways + peers.get(runner, ""), runner=runner))
    every += [
        part("profile", "kernels, launches and gaps of a pass", 15, "gpu.measure:passes", **model, **profiled),
        part("kernels", products, 45, "kernels.command:kernels", **place, **kernels),
        part("prompts", prompts, 40, "gpu.measure:prompts", **model, **warm),
    ]
    for n in sizes["concurrency"]:
        every.append(timing(f"engine-{n}", f"the server's engine, {n} requests at once", 30, batch=n, **engine))
    every += [timing(f"context-{n}", f"batch 1 at context {n}", 30, context=n) for n in longer]
    every.append(timing("verified", "whether verify writes full depth's text", 20, **rule))
    if sizes["compiles"]:
        says = "transformers' own loop compiled, with a static cache"
        every.append(timing("static", says, 90, ways="full,huggingface-static"))
    says, weights = "int8 weights of the block beside floats", {"to": "int8", "context": context}
    every.append(part("int8", says, 60, "quantization.command:quantization", "torchao", **model, **timed, **weights))
    every += [timing(larger, f"{larger} at batch 1", 45, shape=larger) for larger in sizes["larger"]]
    if sizes["compiles"]:
        says = "the best tiling of each product, as a table"
        every.append(part("tune", says, 120, "kernels.command:kernels", **place, **tuned))
    return every


def named(every: Sequence[Part], names: str) -> list[Part]:
    """Parts by their names, comma-separated; "" for all."""
    if not names:
        return list(every)
    by_name = {part.name: part for part in every}
    wanted = names.split(",")
    unknown = sorted(set(wanted) - set(by_name))
    if unknown:
        raise ValueError(f"no such part: {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


class Outcomes:
    """How parts began and ended, in `done.jsonl` of a folder: lines of `key`, `part`, `state`, `seconds` and `why`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "done.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """All lines so far, but for a last one that a killed process left without its end."""
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def add(self, part: Part, state: str, seconds: float = 0.0, why: str = "") -> None:
        """Keeps that a part `began`, or that it is `done`, `failed` or was `stopped`."""
        output = {"key": _key(part), "part": part.name, "state": state, "seconds": seconds, "why": why}
        with alone(self._path):
            append(self._path, json.dumps(output).encode())

    def done(self, part: Part) -> bool:
        """Whether a part has ended well, with these arguments."""
        return any(line["state"] == "done" and line["key"] == _key(part) for line in self.lines())

    def tried(self, part: Part) -> bool:
        """Whether a part has begun."""
        return any(line["key"] == _key(part) for line in self.lines())


def _key(part: Part) -> str:
    return json.dumps([part.name, part.function, part.arguments], default=str)
