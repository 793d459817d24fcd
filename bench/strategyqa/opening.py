"""What a run goes through: items, a model, settings and a cache, out of what the command line says; also by workers.

Workers take items a few at a time, but a level that learns goes through all of its items in one.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from pydantic import TypeAdapter

from sigma0.bench.core.conditions import Strict, settings_sha256, weights_sha256
from sigma0.bench.core.options import AnswerTokens
from sigma0.bench.core.workers import KeptResults, Pool
from sigma0.bench.strategyqa.adaptive import Route
from sigma0.bench.strategyqa.asking import MAX_TOKENS, AnswerCache, AskSettings
from sigma0.bench.strategyqa.batched import BatchedChat
from sigma0.bench.strategyqa.items import Item, Split, load_both, load_items, world_items
from sigma0.bench.strategyqa.level import Answered, Level, LevelRun, labels_used, run_level
from sigma0.bench.strategyqa.registry import EXPERIMENTS, Makings
from sigma0.checkpoints import shipped_models
from sigma0.commands.options import Device, Dtype, ServedModel, Threads, check_known
from sigma0.commands.solve_models import as_ladder, open_chats
from sigma0.config import SHARES, Effort
from sigma0.reason.chat import ChatModel, EndpointChat, LadderChat, LocalChat

WORLD = "world"
# items of the micro-world: scored where no number is given, and seeded from
WORLD_SCORED, WORLD_SEEDS = 60, 200


@dataclass(frozen=True)
class OpenedModel:
    """A model that answers."""

    chat: ChatModel  # It
    identity: str  # Digest of its weights; of an endpoint, of its address
    settings: str  # Digest of its other files; of an endpoint, of nothing
    model: Any  # Of transformers, where it is here; of a ladder the lowest rung's; None of an endpoint
    samples: bool  # Whether it can sample

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return "not known" if self.model is None else str(self.model.dtype).removeprefix("torch.")


def open_model(
    model: str, ladder: str | None, base_url: str | None, device: str, dtype: str, batch_size: int
) -> OpenedModel:
    """The model that the command line names: as `open_chats`, and greedy questions of one without loops in batches."""
    chats = open_chats(model, ladder, base_url, device, dtype)
    names = [name.strip() for name in (ladder or model).split(",") if name.strip()]
    pairs = list(zip(chats, names, strict=True))
    digests = [
        (sha256(f"{chat.rung.base_url} {chat.rung.model}".encode()).hexdigest(), "")
        if isinstance(chat, EndpointChat)
        else (weights_sha256(name), settings_sha256(name))
        for chat, name in pairs
    ]
    identity, settings = (_digest(list(parts)) for parts in zip(*digests, strict=True))
    first = chats[0].model if isinstance(chats[0], LocalChat) else None
    chat, samples = as_ladder(chats)
    if isinstance(chat, LocalChat) and not chat.is_looped and batch_size > 1:
        chat = BatchedChat(chat, batch_size)
    return OpenedModel(chat, identity, settings, first, samples)


def _digest(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else sha256(" ".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Opened:
    """What an `Opening` opens: who is asked what, and how."""

    asked: OpenedModel
    settings: AskSettings
    cache: AnswerCache | None
    concurrency: int  # Items at a time
    retries: int
    items: list[Item]  # That are scored
    train: list[Item]  # That levels may be seeded from
    where: str  # The items are from
    makings: Makings

    def run(self, level: Level, items: Sequence[Item], advance: Callable[[], None]) -> LevelRun:
        """Runs a level over items; see `run_level`."""
        return run_level(
            level, items, self.asked.chat, self.settings, self.cache, self.concurrency, self.retries, advance
        )

    def sha256(self) -> str:
        """Of all that answers depend on and that names may hide: weights, items, and the files levels are made from."""
        asked, made = self.asked, self.makings
        files = (made.paragraphs, made.demonstrations, made.template)
        contents = [None if path is None else sha256(path.read_bytes()).hexdigest() for path in files]
        return sha256(repr([asked.identity, asked.settings, self.items, self.train, contents]).encode()).hexdigest()


class Opening(Strict, allow_inf_nan=True):
    """How a run is opened: what the command line says, by which workers open it again; each field is an option."""

    data: Annotated[
        str, typer.Option(help="Folder of train.json and dev.json, a dataset's hub id, or world: the micro-world.")
    ] = WORLD
    split: Annotated[str, typer.Option(help="Items that are scored: dev or train.")] = "dev"
    n: Annotated[int | None, typer.Option("-n", "--n", min=1, help="The first items at most.")] = None
    model: ServedModel = "pocket"
    ladder: Annotated[str | None, typer.Option(help="Rungs in place of --model, the lowest first.")] = None
    base_url: Annotated[str | None, typer.Option(help="A server that speaks OpenAI's protocol.")] = None
    effort: Annotated[str, typer.Option(help="minimal, low, medium or high.")] = "medium"
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="Of the sampling, and of the micro-world's stories.")] = 0
    max_new_tokens: AnswerTokens = MAX_TOKENS
    concurrency: Annotated[int, typer.Option(min=1, help="Items at a time, and questions in a batch.")] = 16
    retries: Annotated[int, typer.Option(min=0, help="How often an item is begun anew that got no answer.")] = 2
    cache: Annotated[
        Path | None, typer.Option(help="Answers by model and prompt: resumes a run, and repeats it bit for bit.")
    ] = None
    paragraphs: Annotated[
        Path | None, typer.Option(help="L2-rag: the published paragraph file; else facts of train are searched.")
    ] = None
    demonstrations: Annotated[Path | None, typer.Option(help="L1-ptp: traces that `distill` wrote.")] = None
    template: Annotated[Path | None, typer.Option(help="L2: steps that `distill` wrote.")] = None
    route: Annotated[str, typer.Option(help="L4: rules, model or verdict.")] = "rules"
    device: Device = "auto"
    dtype: Dtype = "auto"
    threads: Threads = 1

    def open(self) -> Opened:
        """Opens the items, then the model and the cache.

        Raises:
            ValueError: For a split, a route or an effort that there is not, data that cannot be read, a model that
                cannot be had or cannot sample, or a bad cache.
        """
        check_known("route", self.route, get_args(Route))
        check_known("effort", self.effort, SHARES)
        items, train, where = read_items(self.data, self.split, self.n, self.seed)
        makings = Makings(train, self.paragraphs, self.demonstrations, self.template, cast(Route, self.route))
        settings = AskSettings(cast(Effort, self.effort), self.max_new_tokens, self.temperature, self.seed)
        asked = open_model(self.model, self.ladder, self.base_url, self.device, self.dtype, self.concurrency)
        if settings.temperature > 0 and not asked.samples:
            raise ValueError(f"{asked.chat.name} hands up whole answers, which are greedy: temperature must be 0")
        # answers in another dtype may differ
        identities = {asked.chat.name: f"{asked.identity} {asked.dtype}"}
        kept = None if self.cache is None else AnswerCache(self.cache, identities)
        # one of a model that answers one question at a time
        concurrency = 1 if isinstance(asked.chat, LocalChat | LadderChat) else self.concurrency
        return Opened(asked, settings, kept, concurrency, self.retries, items, train, where, makings)

    def resolved(self) -> "Opening":
        """The same for a process in another folder."""
        ladder = None if self.ladder is None else ",".join(_model_path(name.strip()) for name in self.ladder.split(","))
        data = self.data if self.data == WORLD else _path(self.data)
        files = {name: value.resolve() for name, value in self if isinstance(value, Path)}
        return self.model_copy(update={"data": data, "model": _model_path(self.model), "ladder": ladder, **files})


def read_items(data: str, split: str, n: int | None, seed: int) -> tuple[list[Item], list[Item], str]:
    """The items to be scored, those that levels may be seeded from, and where they are from."""
    if data == WORLD:
        wanted = WORLD_SCORED if n is None else n
        seeds = world_items(WORLD_SEEDS, "train", seed)
        return world_items(wanted, "test", seed), seeds, f"micro-world, test, seed {seed}"
    check_known("split", split, get_args(Split))
    train, dev = load_both(data) if split == "dev" else (load_items(data, "train"), [])
    # levels are never seeded from what is scored
    items, seeds = (dev, train) if split == "dev" else (train, [])
    return items[:n], seeds, f"StrategyQA, {split}"


def _model_path(name: str) -> str:
    # a shipped name goes before a folder of the same name, as where models are loaded
    return name if name in shipped_models() else _path(name)


def _path(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).is_dir() else name


_ANSWERED = TypeAdapter(list[Answered])


Levels = Sequence[tuple[str, Level]]


def pieces_of(levels: Levels, opening: Opening, opened: Opened) -> list[dict[str, Any]]:
    """What workers do one by one, levels that learn first: each of them takes one worker for long.

    Workers get model and items by the opening, which is opened here.
    """
    # with the digest, what was kept of other weights or items is not taken for theirs
    shared = {"opening": opening.model_dump(mode="json"), "sha256": opened.sha256()}
    pieces, n = [], len(opened.items)
    for name, level in sorted(levels, key=lambda item: item[1].learn is None):
        step = n if level.learn else opened.concurrency
        pieces += [{**shared, "level": name, "first": first, "step": step} for first in range(0, n, step)]
    return pieces


def run_pieces(
    levels: Levels, pieces: list[dict[str, Any]], pool: Pool, kept: KeptResults, advance: Callable[[int], None]
) -> list[LevelRun]:
    """Runs levels by workers that have the model each; `advance` is told how many pieces are done."""
    obtained: dict[str, list[Answered]] = {name: [] for name, _ in levels}
    for piece, result in zip(pieces, pool.spread(do_level, pieces, kept, advance), strict=True):
        obtained[piece["level"]] += _ANSWERED.validate_python(result)
    return [LevelRun(level.name, labels_used(level), tuple(obtained[name])) for name, level in levels]


def do_level(piece: Any) -> Any:
    """Runs a level over some items, in a worker."""
    opened, obtained = _opened(json.dumps(piece["opening"]))
    if obtained != piece["sha256"]:
        raise ValueError("a worker found other weights, items or files under the same names than this process did")
    level = _level(json.dumps(piece["opening"]), piece["level"])
    if level.learn:
        # one that knows of no item
        level = EXPERIMENTS[level.name](opened.makings)
    run = opened.run(level, opened.items[piece["first"] : piece["first"] + piece["step"]], lambda: None)
    return [asdict(item) for item in run.answered]


@lru_cache(maxsize=1)
def _opened(output: str) -> tuple[Opened, str]:
    """What a worker opens, once, and its digest; keyed by its text."""
    opening = Opening.model_validate_json(output)
    torch.set_num_threads(opening.threads)
    opened = opening.open()
    return opened, opened.sha256()


@lru_cache(maxsize=len(EXPERIMENTS))
def _level(output: str, name: str) -> Level:
    """A level, made once: some read files or index paragraphs."""
    return EXPERIMENTS[name](_opened(output)[0].makings)
