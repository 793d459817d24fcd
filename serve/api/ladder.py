"""Answers of the server's ladder: asked for by a request, or routed there by the verdict on the engine's answer.

A ladder runs in a thread of its own, one request at a time. Tokens come as they are written; drafts and answers in one
piece. A client that leaves ends a run of tokens after the token under way; a draft or an answer that has begun is
written to its end, and thrown away.

With `SIGMA0_ROUTING=1` the engine's answer is kept back until its verdict is known: where its door says escalate, it
goes up, and what the rungs above write, which is not drawn, takes its place; otherwise it is told as it is. Where the
lowest rung is the served model, the engine's answer is that rung's, and it is not asked again; another ladder is
climbed from its bottom. So routed streams come in one piece too. Not routed are prompts of ids, since rungs may have
other tokenizers, and requests for logprobs, which ladders do not tell: there, as with routing switched off, `door` is a
hint.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from sigma0.config import Effort, ExitConfig, Messages
from sigma0.decode.stopping import StopCut
from sigma0.ladder import Budget, FidelityLadder, LadderGeneration, LadderToken, LocalRung
from sigma0.ladder.answer_unit import Attempt, attempt_from
from sigma0.ladder.budget import RungCost
from sigma0.ladder.ladder import local_rungs
from sigma0.ladder.results import LadderStop
from sigma0.ladder.rungs import at_effort
from sigma0.ladder.trail import Unit
from sigma0.models.limits import check_context
from sigma0.models.ouro import PROMPT_CHUNK
from sigma0.models.prompts import encode
from sigma0.serve.engine.messages import EngineRequest, RequestOutput, TokenOutput
from sigma0.signals.savings import Savings
from sigma0.signals.verdict import explain, objections

logger = logging.getLogger(__name__)
Event = TokenOutput | RequestOutput


@dataclass(frozen=True)
class LadderTask:
    """A job for a ladder.

    Attributes:
        job: What is asked, in the served model's ids.
        prompt: The same as text.
        unit: What goes up.
        exit_config: For every looped rung, which fills in the thresholds that it leaves open; None: as each checkpoint
            says.
        effort: Changes over each looped rung's setting; None where the request names none, or an exit setting.
        budget: The request's own limits.
        trail: Whether decisions are told.
        sources: Texts that the answer may be grounded in, beside the prompt.
    """

    job: EngineRequest
    prompt: str | Messages
    unit: Unit
    exit_config: ExitConfig | None = None
    effort: Effort | None = None
    budget: Budget | None = None
    trail: bool = False
    sources: tuple[str, ...] = ()


class LadderRunner:
    """A ladder in a thread.

    Args:
        ladder: Rungs, policy and budget.
        total_loops: Of the served model.
        served: The name of the served model.

    Attributes:
        names: Of the rungs, the lowest first.
        unit: What goes up where a request does not say: tokens where the rungs can share them, else answers.
    """

    def __init__(self, ladder: FidelityLadder, total_loops: int, served: str | None = None) -> None:
        self._ladder = ladder
        lowest = ladder.rungs[0]
        self._begins_served = isinstance(lowest, LocalRung) and lowest.is_looped and lowest.name == served
        self._total_loops = total_loops
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ladder")
        self.names = tuple(rung.name for rung in ladder.rungs)
        try:
            local_rungs(ladder.rungs)
            self.unit: Unit = "token"
        except ValueError:
            self.unit = "answer"

    def unit_for(self, asked: bool | Literal["token", "draft", "answer"]) -> Unit | None:
        """The unit that `sigma0.ladder` asks for; None where it asks for none."""
        if asked is True:
            return self.unit
        return asked or None

    def check(self, task: LadderTask) -> None:
        """Refuses beforehand what a run would refuse.

        Raises:
            ValueError: Naming it.
        """
        sampling = task.job.sampling
        if task.job.logprobs is not None:
            raise ValueError("a ladder tells no logprobs: leave them out, or leave sigma0.ladder out")
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise ValueError("a ladder knows neither presence_penalty nor frequency_penalty: leave them out")
        if task.unit == "token":
            self._within(task).stream(task.prompt, **self._settings(task))
            return
        if sampling.temperature:
            raise ValueError(
                f"drafts and answers of a ladder are not drawn: set temperature=0, not {sampling.temperature}"
            )
        lowest = self._ladder.rungs[0]
        if isinstance(lowest, LocalRung):
            read = encode(lowest.tokenizer, task.prompt).shape[1]
            check_context(lowest.model, read, task.job.max_new_tokens)

    async def run(self, task: LadderTask, written: RequestOutput | None = None) -> AsyncGenerator[Event, None]:
        """Tokens as they come where they are the unit, then the end. Closing it ends the run, see above.

        Args:
            task: What to write.
            written: What the served model wrote already, as the lowest rung's answer.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        gone = threading.Event()

        def work() -> None:
            for event in self._events(task) if written is None else self._taken_over(task, written):
                if gone.is_set():
                    return
                loop.call_soon_threadsafe(queue.put_nowait, event)

        done = loop.run_in_executor(self._executor, work)
        done.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            await done
        finally:
            gone.set()
            done.cancel()

    async def route(self, engine: AsyncIterator[Event], task: LadderTask) -> AsyncGenerator[Event, None]:
        """The engine's events once all have come, or the ladder's where the verdict on them says escalate."""
        async with aclosing(cast(AsyncGenerator[Event, None], engine)):
            kept = [event async for event in engine]
        ends = [event for event in kept if isinstance(event, RequestOutput)]
        if [end.door for end in ends] != ["escalate"]:
            for event in kept:
                yield event
            return
        try:
            async with aclosing(self.run(task, ends[0] if self._begins_served else None)) as events:
                kept = [event async for event in events]
        except ValueError as error:
            # say a prompt that the lowest rung cannot hold: that costs the ladder's answer, not the one that is there
            logger.warning("the ladder refused what was routed to it: %s", type(error).__name__)
        for event in kept:
            yield event

    def close(self) -> None:
        """Begins nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _within(self, task: LadderTask) -> FidelityLadder:
        """The ladder, its rungs at the request's effort, within the request's limits and the server's own."""
        ladder, budget = self._ladder, task.budget
        if budget is None and task.effort is None:
            return ladder
        least: dict[str, Any] = {}
        for name in (each.name for each in fields(Budget)):
            limits = [
                limit for limit in (getattr(ladder.budget, name), getattr(budget, name, None)) if limit is not None
            ]
            least[name] = min(limits, default=None)
        rungs = ladder.rungs if task.effort is None else [at_effort(rung, task.effort) for rung in ladder.rungs]
        return FidelityLadder(rungs, Budget(**least), ladder.policy, ladder.hysteresis, ladder.doors)

    def _settings(self, task: LadderTask) -> dict[str, Any]:
        job, sampling = task.job, task.job.sampling
        settings: dict[str, Any] = {
            "max_new_tokens": job.max_new_tokens,
            "exit_config": task.exit_config,
            "stop": job.stop,
            "sources": task.sources,
        }
        if task.unit != "token":
            return settings
        settings["repetition_penalty"] = sampling.repetition_penalty
        if sampling.temperature:
            drawn = ("temperature", "top_p", "top_k", "min_p", "seed")
            settings |= {"do_sample": True} | {name: getattr(sampling, name) for name in drawn}
        return settings

    def _events(self, task: LadderTask) -> Iterator[Event]:
        ladder = self._within(task)
        settings = self._settings(task)
        cut = StopCut(task.job.stop)
        if task.unit == "token":
            # of a whole answer nothing was told before its end, so that it may still go up as a whole
            run = ladder.stream(task.prompt, takes_back=task.job.whole, **settings)
            for (token,) in run:
                yield _told(token, cut.feed(token.text))
            found = run.generations[0]
            tokens, text = _cut(found, task.job.stop)
        else:
            found = ladder.generate(task.prompt, task.unit, **settings)
            tokens, text = (), cut.feed(found.text) + cut.flush()
        yield self._done(task, found, tokens, text)

    def _taken_over(self, task: LadderTask, written: RequestOutput) -> Iterator[Event]:
        """What the rungs above make of the engine's answer."""
        found = self._within(task).take_over(task.prompt, _attempt_of(written), **self._settings(task))
        small, *above = found.costs
        costs = tuple(cost.to_dict() for cost in (_cost_of(written, small), *above))
        if found.rung == self.names[0]:
            yield from written.tokens
            yield replace(
                written, door=found.door, door_text=self._door_text(found), trail=self._trail(task, found), costs=costs
            )
            return
        yield replace(
            self._done(task, found, *_cut(found, task.job.stop)),
            cached_tokens=written.cached_tokens,
            preemptions=written.preemptions,
            passes=written.passes + sum(cost.passes for cost in above),
            rows=written.rows + sum(cost.rows for cost in above),
            costs=costs,
        )

    def _trail(self, task: LadderTask, found: LadderGeneration) -> tuple[dict[str, Any], ...]:
        return tuple(asdict(line) for line in found.trail.lines) if task.trail else ()

    def _done(
        self, task: LadderTask, found: LadderGeneration, tokens: tuple[TokenOutput, ...], text: str
    ) -> RequestOutput:
        depths = [token.depth for token in tokens[1:] if token.depth]
        # shares saved are of one model; what the rungs cost stands in the costs
        saved = Savings(sum(depths) / len(depths) if depths else None, None, None, None)
        return RequestOutput(
            text=text,
            tokens=tokens,
            finish_reason="stop" if found.stop_reason in ("eos", "stop", "collapse") else "length",
            prompt_tokens=len(task.job.prompt_ids),
            cached_tokens=0,
            total_loops=self._total_loops,
            passes=sum(cost.passes for cost in found.costs),
            rows=sum(cost.rows for cost in found.costs),
            savings=saved,
            verdict=found.verdict,
            door=found.door,
            door_text=self._door_text(found),
            trail=self._trail(task, found),
            costs=tuple(cost.to_dict() for cost in found.costs),
            collapsed=found.stop_reason == "collapse",
        )

    def _door_text(self, found: LadderGeneration) -> str:
        doors = self._ladder.doors
        if found.door == "converge":
            return explain(found.verdict, doors)
        why = "; ".join(objections(found.verdict, doors)) or "nothing against it"
        if found.door == "abort":
            return f"abort: the budget kept something from going up ({', '.join(found.not_tried)}); {why}."
        if found.door == "accepted":
            return f"accepted: {why}, but the policy in force let it stand."
        return f"top_rung: {why}, and there is no rung above."


def _cut(found: LadderGeneration, stop: tuple[str, ...]) -> tuple[tuple[TokenOutput, ...], str]:
    """The tokens of a text and the text itself, both up to a stop string."""
    cut = StopCut(stop)
    tokens = [_told(token, cut.feed(token.text)) for token in found.tokens]
    if not tokens:
        cut.feed(found.text)
    if (rest := cut.flush()) and tokens:
        tokens[-1] = replace(tokens[-1], text=tokens[-1].text + rest)
    return tuple(tokens), cut.passed


def _attempt_of(written: RequestOutput) -> Attempt:
    """The engine's answer as the lowest rung's."""
    assert written.verdict is not None
    stop_reason: LadderStop = "length" if written.finish_reason == "length" else "eos"
    if written.collapsed:
        stop_reason = "collapse"
    return attempt_from(written.text, written.tokens, written.verdict, stop_reason)


def _cost_of(written: RequestOutput, rung: RungCost) -> RungCost:
    """What the engine spent on an answer, as what the lowest rung did; its prompts share passes with other requests."""
    read = written.prompt_tokens - written.cached_tokens
    loops = written.total_loops
    return replace(
        rung,
        tokens=len(written.tokens),
        passes=written.passes,
        prompt_passes=loops * -(-read // PROMPT_CHUNK),
        rows=written.rows + loops * read,
        read=read,
    )


def _told(token: LadderToken, text: str) -> TokenOutput:
    return TokenOutput(
        id=token.id,
        text=text,
        depth=token.depth,
        reason=token.reason,
        fate=token.fate,
        proximity=token.proximity,
        margin=token.margin,
        entropy=token.entropy,
        logprob=None,
        alternatives=(),
        rung=token.rung,
        handed_up=token.handed_up,
    )
