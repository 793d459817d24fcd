"""Ladder runner: answers of the server's ladder, requested by a client or routed by the verdict on the engine's answer.

A ladder runs in a separate thread, one request at a time. Tokens are streamed as they are sampled, drafts and answers
in one piece. When the client disconnects, a run of tokens ends after the current token; a draft or an answer that was
started is finished and discarded.

With `SIGMA0_ROUTING=1` the engine's answer is held back until its verdict is known: where its routing decision (door)
is escalate, the greedy answer of the rungs above replaces it; otherwise it is sent unchanged. Where the lowest rung is
the served model, the engine's answer counts as that rung's; any other ladder is climbed from its lowest rung. So routed
streams come in one piece too. Not routed are prompts of ids, since rungs may have other tokenizers, and requests for
logprobs, which ladders do not give: there, as with routing switched off, `door` is a hint.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from sigma0.config import Effort, ExitConfig, Messages
from sigma0.decode.detokenizer import StopChecker
from sigma0.ladder import Budget, FidelityLadder, LadderGeneration, LadderToken, LocalRung
from sigma0.ladder.answer_unit import Attempt, attempt_from
from sigma0.ladder.budget import RungCost
from sigma0.ladder.ladder import local_rungs
from sigma0.ladder.results import LadderStop
from sigma0.ladder.rungs import at_effort
from sigma0.ladder.trail import Heading, Unit
from sigma0.models.limits import check_context
from sigma0.models.looped_causal import PROMPT_CHUNK
from sigma0.models.prompts import encode
from sigma0.serve.engine.messages import EngineRequest, RequestOutput, TokenOutput
from sigma0.signals.savings import Savings
from sigma0.signals.verdict import DoorPolicy, explain, objections

logger = logging.getLogger(__name__)
Event = TokenOutput | RequestOutput


@dataclass(frozen=True)
class LadderTask:
    """A request for a ladder."""

    request: EngineRequest  # The request in the served model's ids
    prompt: str | Messages  # Its prompt as text
    unit: Unit  # What is handed up
    # Of every looped rung, which fills in the thresholds that it leaves open; None: each checkpoint's
    exit_config: ExitConfig | None = None
    # Applied to each looped rung's setting; None where the request names none, or an exit setting
    effort: Effort | None = None
    budget: Budget | None = None  # Limits of the request
    trail: bool = False  # Whether decisions are output
    sources: tuple[str, ...] = ()  # Texts that the answer may be grounded in, beside the prompt


class LadderRunner:
    """Runs a ladder in a thread.

    Args:
        ladder: Rungs, policy and budget.
        total_loops: Of the served model.
        served: The name of the served model.

    Attributes:
        names: Of the rungs, the lowest first.
        unit: Default unit that is handed up: tokens where the rungs share a tokenizer, else answers.
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

    def unit_for(self, option: bool | Literal["token", "draft", "answer"]) -> Unit | None:
        """The unit for a value of `sigma0.ladder`; None for False."""
        if option is True:
            return self.unit
        return option or None

    def check(self, task: LadderTask) -> None:
        """Refuses a task before it runs.

        Raises:
            ValueError: Naming what does not fit.
        """
        sampling = task.request.sampling
        if task.request.logprobs is not None:
            raise ValueError("a ladder gives no logprobs: leave them out, or leave sigma0.ladder out")
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise ValueError("a ladder knows neither presence_penalty nor frequency_penalty: leave them out")
        if sampling.logit_bias:
            raise ValueError("a ladder biases no logits: leave logit_bias out")
        if task.unit == "token":
            self._within(task).stream(task.prompt, **self._settings(task))
            return
        if sampling.temperature:
            raise ValueError(
                f"drafts and answers of a ladder are not drawn: set temperature=0, not {sampling.temperature}"
            )
        lowest = self._ladder.rungs[0]
        if isinstance(lowest, LocalRung):
            prompt_length = encode(lowest.tokenizer, task.prompt).shape[1]
            check_context(lowest.model, prompt_length, task.request.max_new_tokens)

    async def run(self, task: LadderTask, written: RequestOutput | None = None) -> AsyncGenerator[Event, None]:
        """Token outputs as they come where tokens are the unit, then the request output. Closing it ends the run.

        Args:
            task: The task.
            written: The engine's answer, used as the lowest rung's.
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

    async def route(
        self, engine: AsyncIterator[Event], task: LadderTask, replaced: Callable[[RequestOutput], None]
    ) -> AsyncGenerator[Event, None]:
        """The engine's events once all have come, or the ladder's where their routing decision is escalate.

        Args:
            engine: Its events.
            task: For the ladder.
            replaced: Called with the engine's output where the ladder's is sent.
        """
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
            # such as a prompt too long for the lowest rung: the engine's answer is sent instead
            logger.warning("the ladder refused what was routed to it: %s", type(error).__name__)
        else:
            replaced(ends[0])
        for event in kept:
            yield event

    def close(self) -> None:
        """Starts no more runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _within(self, task: LadderTask) -> FidelityLadder:
        """The ladder with its rungs at the request's effort, within the limits of both the request and the server."""
        ladder, budget = self._ladder, task.budget
        if budget is None and task.effort is None:
            return ladder
        least: dict[str, Any] = {}
        for name in (field.name for field in fields(Budget)):
            limits = [
                limit for limit in (getattr(ladder.budget, name), getattr(budget, name, None)) if limit is not None
            ]
            least[name] = min(limits, default=None)
        rungs = ladder.rungs if task.effort is None else [at_effort(rung, task.effort) for rung in ladder.rungs]
        return ladder.over(rungs, Budget(**least))

    def _settings(self, task: LadderTask) -> dict[str, Any]:
        request, sampling = task.request, task.request.sampling
        settings: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "exit_config": task.exit_config,
            "stop": request.stop,
            "sources": task.sources,
        }
        if task.unit != "token":
            return settings
        settings["repetition_penalty"] = sampling.repetition_penalty
        if sampling.temperature:
            sampled = ("temperature", "top_p", "top_k", "min_p", "seed")
            settings |= {"do_sample": True} | {name: getattr(sampling, name) for name in sampled}
        return settings

    def _events(self, task: LadderTask) -> Iterator[Event]:
        ladder = self._within(task)
        settings = self._settings(task)
        cut = StopChecker(task.request.stop)
        if task.unit == "token":
            # nothing of a whole answer is sent before its end, so that it may still be handed up as a whole
            run = ladder.stream(task.prompt, takes_back=task.request.whole, **settings)
            for (token,) in run:
                yield _output(token, cut.add(token.text))
            generation = run.generations[0]
            tokens, text = _cut(generation, task.request.stop)
        else:
            generation = ladder.generate(task.prompt, task.unit, **settings)
            tokens, text = (), cut.add(generation.text) + cut.flush()
        yield self._done(task, generation, tokens, text)

    def _taken_over(self, task: LadderTask, written: RequestOutput) -> Iterator[Event]:
        """The events of the rungs above, given the engine's answer."""
        generation = self._within(task).take_over(task.prompt, _attempt_of(written), **self._settings(task))
        small, *above = generation.costs
        lowest = self._ladder.rungs[0]
        assert isinstance(lowest, LocalRung)
        costs = tuple(cost.to_dict() for cost in (_cost_of(written, small, lowest), *above))
        if generation.rung == self.names[0]:
            yield from written.tokens
            yield replace(
                written,
                door=generation.door,
                top_rung=generation.top_rung,
                not_tried=generation.not_tried,
                door_text=_door_text(generation),
                trail=self._trail(task, generation),
                costs=costs,
            )
            return
        tokens, text = _cut(generation, task.request.stop)
        yield from tokens
        yield replace(
            self._done(task, generation, tokens, text),
            cached_tokens=written.cached_tokens,
            preemptions=written.preemptions,
            passes=written.passes + sum(cost.passes for cost in above),
            rows=written.rows + sum(cost.rows for cost in above),
            costs=costs,
        )

    def _trail(self, task: LadderTask, generation: LadderGeneration) -> tuple[dict[str, Any], ...]:
        return tuple(asdict(line) for line in generation.trail.lines) if task.trail else ()

    def _done(
        self, task: LadderTask, generation: LadderGeneration, tokens: tuple[TokenOutput, ...], text: str
    ) -> RequestOutput:
        depths = [token.depth for token in tokens[1:] if token.depth]
        # shares saved are of one model; the work of the rungs is in the costs
        saved = Savings(sum(depths) / len(depths) if depths else None, None, None, None)
        return RequestOutput(
            text=text,
            tokens=tokens,
            finish_reason="stop" if generation.stop_reason in ("eos", "stop", "collapse") else "length",
            prompt_tokens=len(task.request.prompt_ids),
            cached_tokens=0,
            total_loops=self._total_loops,
            passes=sum(cost.passes for cost in generation.costs),
            rows=sum(cost.rows for cost in generation.costs),
            savings=saved,
            verdict=generation.verdict,
            door=generation.door,
            top_rung=generation.top_rung,
            not_tried=generation.not_tried,
            door_text=_door_text(generation),
            trail=self._trail(task, generation),
            costs=tuple(cost.to_dict() for cost in generation.costs),
            collapsed=generation.stop_reason == "collapse",
        )


def _door_text(generation: LadderGeneration) -> str:
    heading = generation.trail.lines[0]
    assert isinstance(heading, Heading)
    doors = DoorPolicy.parse(heading.doors)
    if generation.door == "converge":
        return explain(generation.verdict, doors)
    why = "; ".join(objections(generation.verdict, doors)) or "nothing against it"
    if generation.not_tried:
        return f"abort: the budget kept something from going up ({', '.join(generation.not_tried)}); {why}."
    if generation.door == "escalate":
        return f"escalate: {why}, but the policy in force let it stand."
    return f"abort: {why}, and there is no rung above."


def _cut(generation: LadderGeneration, stop: tuple[str, ...]) -> tuple[tuple[TokenOutput, ...], str]:
    """The tokens of a generation and its text, both cut at a stop string."""
    cut = StopChecker(stop)
    tokens = [_output(token, cut.add(token.text)) for token in generation.tokens]
    if not tokens:
        cut.add(generation.text)
    if (rest := cut.flush()) and tokens:
        tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + rest)
    return tuple(tokens), cut.text


def _attempt_of(written: RequestOutput) -> Attempt:
    """The engine's answer as an attempt of the lowest rung."""
    assert written.verdict is not None
    stop_reason: LadderStop = "length" if written.finish_reason == "length" else "eos"
    if written.collapsed:
        stop_reason = "collapse"
    return attempt_from(written.text, written.tokens, written.verdict, stop_reason)


def _cost_of(written: RequestOutput, cost: RungCost, rung: LocalRung) -> RungCost:
    """Costs of the engine's answer as costs of the lowest rung; its prefill shares passes with other requests."""
    prefilled = written.prompt_tokens - written.cached_tokens
    loops, chunks = written.total_loops, -(-prefilled // PROMPT_CHUNK)
    # every token after the first enters once, and is read at least once
    others = chunks + len(written.tokens) - 1
    return replace(
        cost,
        tokens=len(written.tokens),
        passes=written.passes,
        prompt_passes=loops * chunks,
        rows=written.rows + loops * prefilled,
        read=prefilled,
        beside_bytes=rung.beside_bytes(others, others),
    )


def _output(token: LadderToken, text: str) -> TokenOutput:
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
        deepest_surprise=token.deepest_surprise,
        deepest_entropy=token.deepest_entropy,
        deepest_margin=token.deepest_margin,
        deepest_agrees=token.deepest_agrees,
    )
