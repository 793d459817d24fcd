"""`sigma0 solve`: the outer loops from the command line, with their progress, a trail, and what came of it."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from sigma0.checkpoints import resolve_model
from sigma0.commands.console import loading, one_line_errors, printable
from sigma0.commands.options import AsJson, Device, Dtype, ServedModel
from sigma0.errors import needs_extra


def solve(
    problem: Annotated[str, typer.Argument(help="What is to be solved; - reads it from standard input.")],
    strategy: Annotated[str, typer.Option(help="progressive, lemma or agent.")] = "progressive",
    model: ServedModel = "pocket-solver",
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
        Path | None, typer.Option(help="Of the run: progressive's state after every iteration, the others' answers.")
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
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Solve a problem by an outer loop; the exit code is 0 if its own gate was passed, 1 if not."""
    with one_line_errors(), ExitStack() as waiting:
        text = typer.get_text_stream("stdin").read().strip() if problem == "-" else problem
        _check(text, strategy, {"memory": memory, "repo": repo, "patch": patch, "graph": graph}, resume, temperature)
        written = [path for path in (trail, patch, graph, memory) if path is not None]
        for path in written:
            _check_writable(path)
        if len({path.resolve() for path in written}) < len(written):
            raise ValueError("--trail, --patch, --graph and --memory have to be different files")
        if ladder is None and base_url is None:
            resolve_model(model)
        waiting.enter_context(loading(ladder or model, hidden=as_json))
        from sigma0.checkpoints.about import unseen_note
        from sigma0.commands.examples import about_model
        from sigma0.commands.solve_models import open_chats
        from sigma0.commands.solve_progress import SolveProgress, summary
        from sigma0.commands.solve_strategies import STRATEGIES, Order
        from sigma0.reason.chat import ChatFailed
        from sigma0.reason.desk import Desk, Limits
        from sigma0.reason.trail import Strategy, Trail

        limits = Limits(calls=max_calls, seconds=max_seconds)
        chats = open_chats(model, ladder, base_url, device, dtype)
        waiting.close()
        note = unseen_note(*about_model(model), text) if ladder is None and base_url is None else None
        if note is not None:
            typer.echo(note, err=True)
        order = Order(
            text, cast(Strategy, strategy), chats, config, memory, resume, repo, graph, temperature, max_tokens
        )
        with SolveProgress(order.strategy, hidden=as_json) as progress:
            desk = Desk(Trail(trail, progress), limits, seed)
            try:
                result = STRATEGIES[strategy](order, desk)
            except ChatFailed as error:
                kept = f"; --memory {memory} --resume goes on" if memory is not None else ""
                raise ValueError(f"{error}{kept}") from error
    if patch is not None:
        patch.write_text(result.report["patch"], encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"strategy": strategy, **result.report}, indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(printable(result.text), markup=False)
        console.print(f"\n{'solved' if result.solved else 'NOT solved'}: {printable(result.why)}", markup=False)
        for line in summary(result.report):
            console.print(line, markup=False)
    if not result.solved:
        raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    """Refuses a file that could not be written once all is done.

    Raises:
        ValueError: Naming it.
    """
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
    from sigma0.reason.trail import Strategy

    if not problem.strip():
        raise ValueError("the problem is empty")
    if any("\ud800" <= sign <= "\udfff" for sign in problem):
        raise ValueError("the problem is no UTF-8 text")
    if strategy not in get_args(Strategy):
        raise ValueError(f"no such strategy: {strategy!r}; there are {', '.join(get_args(Strategy))}")
    of = {"repo": "agent", "patch": "agent", "graph": "lemma"}
    for name, path in files.items():
        if path is not None and of.get(name, strategy) != strategy:
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
