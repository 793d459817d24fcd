"""`sigma0 solve`: the outer loops from the command line, with their progress, a trail, and what came of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from sigma0.commands.console import one_line_errors, printable, quiet_transformers
from sigma0.commands.solve_models import as_ladder, follows_instructions, open_chats
from sigma0.commands.solve_progress import SolveProgress, lemma_line
from sigma0.extras import needs_extra
from sigma0.reason.agent.agent import AgentSettings, RepoAgent
from sigma0.reason.chat import ChatFailed, ChatModel
from sigma0.reason.desk import Desk, Limits
from sigma0.reason.lemma import ALGSolver, LemmaSettings, draw
from sigma0.reason.progressive.bare import BareQuestion
from sigma0.reason.progressive.critique import Critique
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.policies import named_config
from sigma0.reason.progressive.verify_loop import VerifyLoop
from sigma0.reason.sandbox.sandbox import Sandbox
from sigma0.reason.trail import Heading, Outcome, Strategy, Trail

_LIBRARIES = ("sigma0-lm", "torch", "transformers")


@dataclass(frozen=True)
class Solved:
    """What a strategy hands back to the command line.

    Attributes:
        solved: Whether its own gate was passed.
        text: What is printed.
        why: In a sentence.
        report: All of it, as JSON.
    """

    solved: bool
    text: str
    why: str
    report: dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What the command line asks for.

    Attributes:
        problem: What is to be solved.
        strategy: Which outer loop.
        chats: Models, the cheapest first.
        config: Name of a policy, or a JSON file; None: the default.
        memory: Of a progressive run.
        resume: Whether the memory is taken up.
        repo: Folder of an agent's task.
        graph: Where a lemma graph is drawn.
        temperature: None: the strategy's own.
        max_tokens: Likewise.
    """

    problem: str
    strategy: Strategy
    chats: list[ChatModel]
    config: str | None
    memory: Path | None
    resume: bool
    repo: Path | None
    graph: Path | None
    temperature: float | None
    max_tokens: int | None


def solve(
    problem: Annotated[str, typer.Argument(help="What is to be solved; - reads it from standard input.")],
    strategy: Annotated[str, typer.Option(help="progressive, lemma or agent.")] = "progressive",
    model: Annotated[str, typer.Option(help="Shipped name, folder, hub id, or a server's name for it.")] = "pocket",
    ladder: Annotated[
        str | None, typer.Option(help="Rungs in place of --model, the lowest first: small,name@http://host/v1")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="A server that speaks OpenAI's protocol; its key is in OPENAI_API_KEY.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Name of a policy of effort, or a JSON file of the strategy's settings.")
    ] = None,
    memory: Annotated[
        Path | None, typer.Option(help="progressive: state of the run, replaced after every iteration.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the memory file.")] = False,
    repo: Annotated[Path | None, typer.Option(help="agent: folder whose tests are to pass; it is not changed.")] = None,
    patch: Annotated[Path | None, typer.Option(help="agent: where the patch is written, solved or not.")] = None,
    graph: Annotated[Path | None, typer.Option(help="lemma: where the graph is drawn, as .svg or .mmd.")] = None,
    trail: Annotated[Path | None, typer.Option(help="Where every question, run and decision is written.")] = None,
    seed: Annotated[int, typer.Option(help="Of all samples.")] = 0,
    temperature: Annotated[float | None, typer.Option(help="Of texts; 0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="New tokens of each text at most.")] = None,
    max_calls: Annotated[int | None, typer.Option(min=1, help="Questions to models at most.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="No question is begun after this time.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Solve a problem by an outer loop; the exit code is 0 if its own gate was passed, 1 if not."""
    with one_line_errors():
        text = typer.get_text_stream("stdin").read().strip() if problem == "-" else problem
        _check(text, strategy, {"memory": memory, "repo": repo, "patch": patch, "graph": graph}, resume, temperature)
        for path in (trail, patch, graph, memory):
            _check_writable(path)
        quiet_transformers()
        limits = Limits(calls=max_calls, seconds=max_seconds)
        chats = open_chats(model, ladder, base_url, device, dtype)
        order = Order(
            text, cast(Strategy, strategy), chats, config, memory, resume, repo, graph, temperature, max_tokens
        )
        with SolveProgress(order.strategy, hidden=as_json) as progress:
            desk = Desk(Trail(trail, progress), limits, seed)
            try:
                found = _STRATEGIES[strategy](order, desk)
            except ChatFailed as error:
                kept = f"; --memory {memory} --resume goes on" if memory is not None else ""
                raise ValueError(f"{error}{kept}") from error
    if patch is not None:
        patch.write_text(found.report["patch"], encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"strategy": strategy, **found.report}, indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(printable(found.text), markup=False)
        console.print(f"\n{'solved' if found.solved else 'NOT solved'}: {printable(found.why)}", markup=False)
    if not found.solved:
        raise typer.Exit(1)


def _check_writable(path: Path | None) -> None:
    """Refuses a file that could not be written once all is done.

    Raises:
        ValueError: Naming it.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{str(path)!r}: there is no such folder")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: name a file")


def _check(
    problem: str, strategy: str, files: Mapping[str, Path | None], resume: bool, temperature: float | None
) -> None:
    """Refuses what makes no sense before a model is loaded.

    Raises:
        ValueError: Naming it.
    """
    if not problem.strip():
        raise ValueError("the problem is empty")
    if any("\ud800" <= sign <= "\udfff" for sign in problem):
        raise ValueError("the problem is no UTF-8 text")
    if strategy not in get_args(Strategy):
        raise ValueError(f"no such strategy: {strategy!r}; there are {', '.join(get_args(Strategy))}")
    of = {"memory": "progressive", "repo": "agent", "patch": "agent", "graph": "lemma"}
    for name, path in files.items():
        if path is not None and of[name] != strategy:
            raise ValueError(f"--{name} has no meaning with --strategy {strategy}, only with {of[name]}")
    memory, repo, graph = files["memory"], files["repo"], files["graph"]
    if graph is not None and graph.suffix not in (".svg", ".mmd"):
        raise ValueError(f"--graph {str(graph)!r} ends neither in .svg nor in .mmd")
    if graph is not None and graph.suffix == ".svg":
        with needs_extra("bench"):
            import matplotlib as matplotlib
    if resume and memory is None:
        raise ValueError("--resume needs --memory FILE")
    if memory is not None and memory.exists() and not resume:
        raise ValueError(f"--memory {str(memory)!r} exists: add --resume to go on with it, or name another file")
    if strategy == "agent" and (repo is None or not repo.is_dir()):
        raise ValueError(f"--strategy agent needs --repo FOLDER, got {'none' if repo is None else repr(str(repo))}")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a number of at least 0, got {temperature}")


def _head(order: Order, desk: Desk, models: list[ChatModel], settings: dict[str, Any]) -> None:
    names = tuple(model.name for model in models)
    versions = {name: version(name) for name in _LIBRARIES}
    desk.trail.add(Heading(order.strategy, order.problem, names, settings, versions, order.resume))


def _own(order: Order) -> dict[str, Any]:
    """The settings of a JSON file, and over them what stands on the command line."""
    values: dict[str, Any] = {}
    if order.config is not None:
        try:
            values = json.loads(Path(order.config).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"--config {order.config!r} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"--config {order.config!r} holds no JSON object")
    given = {"temperature": order.temperature, "max_tokens": order.max_tokens}
    return {**values, **{name: value for name, value in given.items() if value is not None}}


def _progressive(order: Order, desk: Desk) -> Solved:
    chat, samples = as_ladder(order.chats)
    manager = ProgressiveReasoningManager(None if order.config is None else named_config(order.config))
    own = 0.7 if samples else 0.0
    settings: dict[str, Any] = {"temperature": own if order.temperature is None else order.temperature}
    if order.max_tokens is not None:
        settings["max_tokens"] = order.max_tokens
    kind = Critique if follows_instructions(order.chats) else BareQuestion
    loop = VerifyLoop(
        kind(order.problem), desk, chat, manager=manager, memory=order.memory, problem=order.problem, **settings
    )
    if order.resume:
        loop.resume()
        if order.config is not None and loop.manager.config != manager.config:
            raise ValueError(f"--config {order.config} is not the policy of the memory file: leave it out to go on")
    _head(order, desk, [chat], {**settings, "policy": loop.manager.config.to_dict()})
    report = loop.run()
    return Solved(report.solved, report.solution or "", report.why, report.to_dict())


def _lemma(order: Order, desk: Desk) -> Solved:
    settings = LemmaSettings.from_dict(_own(order))
    model, above = order.chats[0], order.chats[-1] if len(order.chats) > 1 else None
    _head(order, desk, order.chats, settings.to_dict())
    found = ALGSolver(model, Sandbox(), above=above, settings=settings, desk=desk).solve(order.problem)
    desk.trail.add(Outcome(found.verified, found.answer or found.best_guess, found.why, asdict(found.usage)))
    if order.graph is not None and found.graph is not None:
        draw(found.graph, order.graph)
    lemmas = [] if found.graph is None else [lemma_line(each.id, each.status) for each in found.graph.order()]
    answer = found.answer if found.verified else f"best guess, which nothing vouches for: {found.best_guess or 'none'}"
    return Solved(found.verified, "\n".join([*lemmas, answer or ""]), found.why, found.to_dict())


def _agent(order: Order, desk: Desk) -> Solved:
    settings = AgentSettings.from_dict(_own(order))
    _head(order, desk, order.chats, settings.to_dict())
    assert order.repo is not None
    found = RepoAgent(order.chats, Sandbox(), desk, settings).solve(order.problem, order.repo)
    desk.trail.add(Outcome(found.solved, found.patch, found.why, asdict(found.usage)))
    return Solved(found.solved, found.patch or "the workspace is unchanged", found.why, found.to_dict())


_STRATEGIES: dict[str, Callable[[Order, Desk], Solved]] = {
    "progressive": _progressive,
    "lemma": _lemma,
    "agent": _agent,
}
