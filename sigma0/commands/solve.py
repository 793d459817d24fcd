"""`sigma0 solve`: the outer loops from the command line, with their progress, a trail, and what came of it."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from typer import Option

from sigma0.checkpoints import resolve_model
from sigma0.commands.console import loading, one_line_errors, printable
from sigma0.commands.options import AsJson, Device, Dtype, ServedModel, grouped
from sigma0.errors import needs_extra


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """How a problem is solved, by which models, within which limits."""

    strategy: Annotated[str, Option(help="progressive, lemma or agent.")] = "progressive"
    model: ServedModel = "pocket-solver"
    ladder: Annotated[
        str | None, Option(help="Rungs in place of --model, the lowest first: small,name@http://host/v1")
    ] = None
    base_url: Annotated[
        str | None, Option(help="A server that speaks OpenAI's protocol; its key is in OPENAI_API_KEY.")
    ] = None
    config: Annotated[
        str | None, Option(help="Name of a policy of effort, or a JSON file of the strategy's settings.")
    ] = None
    memory: Annotated[
        Path | None, Option(help="Of the run: progressive's state after every iteration, the others' answers.")
    ] = None
    resume: Annotated[bool, Option("--resume", help="Go on from the memory file.")] = False
    repo: Annotated[Path | None, Option(help="agent: folder whose tests are to pass; it is not changed.")] = None
    patch: Annotated[Path | None, Option(help="agent: where the patch is written, solved or not.")] = None
    graph: Annotated[Path | None, Option(help="lemma: where the graph is drawn, as .svg or .mmd.")] = None
    trail: Annotated[Path | None, Option(help="Where every question, run and decision is written.")] = None
    seed: Annotated[int, Option(help="Of all samples.")] = 0
    temperature: Annotated[float | None, Option(help="Of texts; 0 is greedy.")] = None
    max_tokens: Annotated[int | None, Option(min=1, help="New tokens of each text at most.")] = None
    max_calls: Annotated[int | None, Option(min=1, help="Questions to models at most.")] = None
    max_seconds: Annotated[float | None, Option(help="No question is begun after this time.")] = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    as_json: AsJson = False

    def check(self) -> None:
        """Refuses what makes no sense before a model is loaded.

        Raises:
            ValueError: Naming it.
        """
        from sigma0.reason.trail import Strategy

        if self.strategy not in get_args(Strategy):
            raise ValueError(f"no such strategy: {self.strategy!r}; there are {', '.join(get_args(Strategy))}")
        for name, strategy in (("repo", "agent"), ("patch", "agent"), ("graph", "lemma")):
            if getattr(self, name) is not None and self.strategy != strategy:
                raise ValueError(f"--{name} has no meaning with --strategy {self.strategy}, only with {strategy}")
        if self.graph is not None and self.graph.suffix not in (".svg", ".mmd"):
            raise ValueError(f"--graph {str(self.graph)!r} ends neither in .svg nor in .mmd")
        if self.graph is not None and self.graph.suffix == ".svg":
            with needs_extra("bench"):
                import matplotlib as matplotlib
        if self.resume and self.memory is None:
            raise ValueError("--resume needs --memory FILE")
        if self.memory is not None and self.memory.exists() and not self.resume:
            raise ValueError(
                f"--memory {str(self.memory)!r} exists: add --resume to go on with it, or name another file"
            )
        if self.strategy == "agent" and (self.repo is None or not self.repo.is_dir()):
            named = "none" if self.repo is None else repr(str(self.repo))
            raise ValueError(f"--strategy agent needs --repo FOLDER, got {named}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        written = [path for path in (self.trail, self.patch, self.graph, self.memory) if path is not None]
        for path in written:
            if not path.absolute().parent.is_dir():
                raise ValueError(f"{str(path)!r}: there is no such folder")
            if path.is_dir():
                raise ValueError(f"{str(path)!r} is a folder: name a file")
        if len({path.resolve() for path in written}) < len(written):
            raise ValueError("--trail, --patch, --graph and --memory have to be different files")


@grouped
def solve(
    problem: Annotated[str, typer.Argument(help="What is to be solved; - reads it from standard input.")],
    asked: SolveOptions,
) -> None:
    """Solve a problem by an outer loop; the exit code is 0 if its own gate was passed, 1 if not."""
    with one_line_errors(), ExitStack() as waiting:
        text = typer.get_text_stream("stdin").read().strip() if problem == "-" else problem
        if not text.strip():
            raise ValueError("the problem is empty")
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ValueError("the problem is no UTF-8 text")
        asked.check()
        alone = asked.ladder is None and asked.base_url is None
        if alone:
            resolve_model(asked.model)
        waiting.enter_context(loading(asked.ladder or asked.model, hidden=asked.as_json))
        from sigma0.checkpoints.about import unseen_note
        from sigma0.commands.examples import about_model
        from sigma0.commands.solve_models import open_chats
        from sigma0.commands.solve_progress import SolveProgress, summary
        from sigma0.commands.solve_strategies import STRATEGIES, Order
        from sigma0.reason.chat import ChatFailed
        from sigma0.reason.desk import Desk, Limits
        from sigma0.reason.trail import Trail

        limits = Limits(calls=asked.max_calls, seconds=asked.max_seconds)
        chats = open_chats(asked.model, asked.ladder, asked.base_url, asked.device, asked.dtype)
        waiting.close()
        if alone and (note := unseen_note(*about_model(asked.model), text)) is not None:
            typer.echo(note, err=True)
        with SolveProgress(asked.strategy, hidden=asked.as_json) as progress:
            order = Order(text, asked, chats, Desk(Trail(asked.trail, progress), limits, asked.seed))
            try:
                result = STRATEGIES[asked.strategy](order)
            except ChatFailed as error:
                kept = f"; --memory {asked.memory} --resume goes on" if asked.memory is not None else ""
                raise ValueError(f"{error}{kept}") from error
    if asked.patch is not None:
        asked.patch.write_text(result.report["patch"], encoding="utf-8")
    if asked.as_json:
        typer.echo(json.dumps({"strategy": asked.strategy, **result.report}, indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False, soft_wrap=True)
        outcome = f"\n{'solved' if result.solved else 'NOT solved'}: {printable(result.why)}"
        for line in (printable(result.text), outcome, *summary(result.report)):
            console.print(line, markup=False)
    if not result.solved:
        raise typer.Exit(1)
