"""Inputs of the simulation, measured on the real engine: passes timed by their rows, and the depths of its answers."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from sigma0.bench.core.conditions import Conditions
from sigma0.bench.simulation.cluster import LONG, SHORT
from sigma0.bench.simulation.inputs import (
    TERMS,
    Check,
    Inputs,
    Kind,
    MeasuredAnswer,
    PassClock,
    PassTime,
    PassTimes,
    percentiles,
)
from sigma0.bench.simulation.replica import PassWork, Replica, Request
from sigma0.config import ExitConfig
from sigma0.decode.kv_store import BlockShape
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestFailed, RequestOutput, TokenOutput

# Rows at which the line by rows may bend.
KNOTS = (1, 4, 16, 64, 128, 256, 512, 1024)
APART = 1.5
# Passes that took longer than the others by so many times their spread were disturbed.
OUTLIERS = 6.0
FEWEST = 50
# The fit and the paces of the rounds are found in turn.
TURNS = 3


class TimedPass(NamedTuple):
    """What a pass held, and the seconds that it took."""

    work: PassWork
    seconds: float


def fit_passes(rounds: Sequence[Sequence[TimedPass]]) -> PassTimes:
    """Fits times that nothing in a pass can make shorter, more rows neither.

    Passes that something else on the machine disturbed do not bend the fit, but their time counts: all fitted times
    together are all measured ones.

    Raises:
        ValueError: If they are too few, hold no row, or took no time.
    """
    passes = [item for result in rounds for item in result]
    if len(passes) < FEWEST or not all(rounds):
        raise ValueError(f"{len(passes)} passes are too few to tell how their time grows: give more prompts")
    bad = next((item for item in passes if item.work.rows < 1 or not 0 < item.seconds < float("inf")), None)
    if bad is not None:
        raise ValueError(f"a pass has at least 1 row and takes more than 0 seconds, got {bad}")
    rows = np.array([item.work.rows for item in passes], dtype=np.float64)
    knots = knots_for(int(rows.min()), int(rows.max()))
    # how much of each rise from knot to knot the line has taken at some rows; of the first all
    hats = np.column_stack([np.interp(rows, knots, item) for item in np.eye(len(knots))])
    rises = np.cumsum(hats[:, ::-1], axis=1)[:, ::-1]
    others = [[term(item.work) for term in TERMS.values()] for item in passes]
    parts = np.column_stack([rises, np.array(others, dtype=np.float64)])
    took = 1000 * np.array([item.seconds for item in passes])
    number = np.repeat(np.arange(len(rounds)), [len(result) for result in rounds])
    paces = np.ones(len(rounds))
    for _ in range(TURNS):
        weights, kept = _undisturbed(parts, took / paces[number])
        fitted = parts @ weights
        whole = took.sum() / fitted.sum()
        paces = np.bincount(number, took) / np.bincount(number, fitted) / whole
    by_rows = np.cumsum(whole * weights[: len(knots)]).tolist()
    left = (took - paces[number] * fitted)[kept]
    return PassTimes(
        by_rows=tuple(PassTime(rows=knot, milliseconds=value) for knot, value in zip(knots, by_rows, strict=True)),
        **dict(zip(TERMS, (whole * weights[len(knots) :]).tolist(), strict=True)),
        passes=len(passes),
        paces=tuple(paces.tolist()),
        explained=float(1 - left.var() / max(float(took[kept].var()), 1e-12)),
    )


def _undisturbed(
    parts: NDArray[np.float64], took: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The least squares of passes that did not take far longer than the others say, and which those are."""
    from scipy.optimize import nnls

    kept = np.ones(len(took), dtype=np.bool_)
    for _ in range(2):
        weights: NDArray[np.float64] = nnls(parts[kept], took[kept])[0]
        errors = took - parts @ weights
        middle = np.median(errors[kept])
        kept = errors <= middle + OUTLIERS * max(float(np.median(np.abs(errors[kept] - middle))), 1e-9)
    return weights, kept


def knots_for(least: int, most: int) -> list[int]:
    """Rows at which the line by rows may bend, and its ends; the last two well apart, since it goes on after them."""
    return [least, *(knot for knot in KNOTS if least < knot < most / APART), max(most, least + 1)]


LIMITS = EngineLimits(max_waiting=10**6)
AT_ONCE = (2, 4, 8, 16)
# Everything is done so often, each time with prompts of its own, so that a machine that slows down slows all of it.
ROUNDS = 6
# Shares of the requests a second that two at a time make, at which requests come at random: passes of the first are
# fitted, the simulation is checked at the others.
FITTED = (0.4, 0.65, 0.9)
CHECKED = (0.3, 0.5, 0.8)
# Courses of arrivals in each round at each of the loads that are checked.
COURSES = 2
STEPS = ROUNDS * (2 + len(AT_ONCE) + len(FITTED) + len(CHECKED))
# Moments, in seconds, and what comes then.
Arrivals = list[tuple[float, EngineRequest]]
# Ends of answers, and the seconds from arrival to them.
Played = list[tuple[RequestOutput, float]]


@dataclass
class Stopwatch:
    """Steps of an engine, and what each took."""

    device: torch.device  # Where the engine runs
    passes: list[TimedPass] = field(default_factory=list)  # One for each step

    @property
    def name(self) -> str:
        """What the times are taken with."""
        return "wall clock" if self.device.type == "cuda" else "CPU time of the thread that runs the passes"

    def step(self, engine: Engine) -> tuple[list[Any], float]:
        """A step of the engine: its events and the seconds."""
        before, chunks, began = engine.status(), engine.counts.prompt_chunks, self._now()
        events = engine.step()
        seconds = self._now() - began
        after = engine.status()
        tokens = sum(isinstance(event, TokenOutput) for _, event in events)
        ended = sum(isinstance(event, RequestOutput | RequestFailed) for _, event in events)
        ran = after.running + ended
        work = PassWork(
            rows=after.rows - before.rows,
            chunks=engine.counts.prompt_chunks - chunks,
            requests=ran,
            tokens=tokens,
            begun=max(0, ran - before.running),
            ended=ended,
        )
        self.passes.append(TimedPass(work, seconds))
        return events, seconds

    def _now(self) -> float:
        # one thread does all the work on a CPU, and its own time is not disturbed by others on the machine
        if self.device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure_inputs(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    conditions: Conditions,
    prompts: Sequence[tuple[int, ...]],
    short: ExitConfig,
    advance: Callable[[int], None] = lambda done: None,
) -> Inputs:
    """Answers every prompt under two exit settings, alone and beside others, and times every pass.

    The short traffic runs under the setting `short`, the long one at full depth. On a CPU torch must use one thread.

    Raises:
        ValueError: For a setting that is not simulated, or too few prompts.
    """
    if short.after_exit != "finish":
        raise ValueError(f"after_exit {short.after_exit!r} is not simulated: use finish")
    if len(prompts) < 2 * ROUNDS:
        raise ValueError(f"{len(prompts)} prompts are too few for {ROUNDS} rounds: give {2 * ROUNDS} at least (-n)")
    configs = {SHORT: short, LONG: ExitConfig(mode="full")}
    watches, done = [Stopwatch(model.device) for _ in range(ROUNDS)], iter(range(1, STEPS + 1))
    answers: dict[str, list[MeasuredAnswer]] = {name: [] for name in configs}
    courses: dict[float, list[tuple[Arrivals, Played, Stopwatch]]] = {load: [] for load in CHECKED}
    most = 0.0

    def ready() -> Engine:
        return Engine(model, tokenizer, conditions.model, LIMITS)

    for number, watch in enumerate(watches):
        mine = prompts[number::ROUNDS]
        new = conditions.max_new_tokens
        jobs = {
            name: [EngineRequest(ids, new, config, on_collapse="ignore") for ids in mine]
            for name, config in configs.items()
        }
        # the first steps of a process are slow
        play(ready(), [(0.0, job) for job in jobs[SHORT][:2]], Stopwatch(model.device))
        for name, asked in jobs.items():
            for job in asked:
                ((end, _),) = play(ready(), [(0.0, job)], watch)
                depths = tuple(token.depth for token in end.tokens)
                answers[name].append(MeasuredAnswer(prompt=len(job.prompt_ids), depths=depths))
            advance(next(done))
        every = [*jobs[SHORT], *jobs[LONG]]
        for at_once in AT_ONCE:
            seconds = _crowded(ready(), every, at_once, watch)
            most = 2 * len(mine) / seconds if not number else most
            advance(next(done))
        for load in FITTED:
            play(ready(), at_random(every, load * most, f"{number}/{load}"), watch)
            advance(next(done))
        for load, played in courses.items():
            for course in range(COURSES):
                arrivals, current = at_random(every, load * most, f"{number}/{load}/{course}"), Stopwatch(model.device)
                played.append((arrivals, play(ready(), arrivals, current), current))
            advance(next(done))
    shape = BlockShape.of(model, LIMITS.page_size)
    result = Inputs(
        conditions=conditions,
        clock=watches[0].name,
        machine_load=(os.getloadavg()[2], os.cpu_count() or 1),
        loops=model.num_loops,
        running=LIMITS.max_running,
        pass_rows=LIMITS.pass_rows,
        page=LIMITS.page_size,
        kept=LIMITS.kv_bytes // shape.bytes_with(model.dtype) * LIMITS.page_size,
        pass_times=fit_passes([watch.passes for watch in watches]),
        kinds={
            name: Kind(exit_config=config.to_dict(), answers=tuple(answers[name])) for name, config in configs.items()
        },
    )
    return result.model_copy(
        update={"checks": tuple(check(result, load * most, played) for load, played in courses.items())}
    )


def _crowded(engine: Engine, jobs: Sequence[EngineRequest], number: int, watch: Stopwatch) -> float:
    """Answers jobs, so many at a time; the seconds."""
    queue, under_way, seconds = list(reversed(jobs)), 0, 0.0
    while queue or under_way:
        while queue and under_way < number:
            engine.submit(queue.pop())
            under_way += 1
        events, step = watch.step(engine)
        seconds += step
        under_way -= sum(isinstance(event, RequestOutput | RequestFailed) for _, event in events)
    return seconds


def play(engine: Engine, arrivals: Arrivals, watch: Stopwatch) -> Played:
    """Gives the engine jobs at their moments, in a time in which nothing but its steps passes."""
    queue, now = list(arrivals)[::-1], 0.0
    began: dict[int, tuple[int, float]] = {}
    result: dict[int, tuple[RequestOutput, float]] = {}
    while queue or engine.has_work:
        if not engine.has_work:
            now = max(now, queue[-1][0])
        while queue and queue[-1][0] <= now:
            moment, job = queue.pop()
            began[engine.submit(job)] = len(began), moment
        events, seconds = watch.step(engine)
        now += seconds
        for key, event in events:
            if isinstance(event, RequestFailed):
                raise event
            if isinstance(event, RequestOutput):
                number, moment = began[key]
                result[number] = event, now - moment
    return [result[number] for number in range(len(result))]


def at_random(jobs: Sequence[EngineRequest], rate: float, seed: str) -> Arrivals:
    """Jobs in any order, as a Poisson process of so many a second."""
    rng = Random(f"check/{seed}")
    moments = np.cumsum([rng.expovariate(rate) for _ in jobs]).tolist()
    return list(zip(moments, rng.sample(jobs, len(jobs)), strict=True))


def check(inputs: Inputs, rate: float, courses: Sequence[tuple[Arrivals, Played, Stopwatch]]) -> Check:
    """What the real engine took for arrivals at random, beside the simulation of the same ones.

    Each course is simulated at the pace of the machine meanwhile: what its passes took over what the fit says of them.
    """
    simulated, measured, paces = [], [], []
    for arrivals, played, watch in courses:
        fitted = PassClock(inputs.pass_times)
        paces.append(sum(item.seconds for item in watch.passes) / sum(fitted(item.work) for item in watch.passes))
        replica = Replica(inputs.limits, PassClock(inputs.pass_times, paces[-1]))
        requests, now = [], 0.0
        for (moment, job), (end, _) in zip(arrivals, played, strict=True):
            text = (*job.prompt_ids, *(token.id for token in end.tokens))
            depths = tuple(token.depth for token in end.tokens)
            requests.append(Request(len(job.prompt_ids), depths, text=text, arrived=moment))
        queue = requests[::-1]
        while queue or replica.load:
            now = now if replica.load else max(now, queue[-1].arrived)
            while queue and queue[-1].arrived <= now:
                replica.add(queue.pop())
            now += replica.begin_pass(now)
            replica.end_pass(now)
        simulated += [request.ended - request.arrived for request in requests]
        measured += [seconds for _, seconds in played]
    return Check(
        rate=rate,
        requests=len(measured),
        paces=tuple(paces),
        measured=percentiles(measured),
        simulated=percentiles(simulated),
    )
