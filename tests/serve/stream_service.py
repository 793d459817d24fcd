"""A service that needs no engine: `sigma0.stream` in a thread, one job after the other."""

import asyncio
import queue
import threading
from dataclasses import replace

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import sigma0
from sigma0.savings import Savings
from sigma0.serve.messages import Alternative, Busy, Job, JobDone, JobFailed, ServiceStatus, TokenTold
from sigma0.serve.stopping import StopCut
from sigma0.settings import switches
from sigma0.verdict import explain


class Scores(LogitsProcessor):
    """Keeps the log-probabilities of every position, then takes penalties off."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.at: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids, scores):
        self.at[input_ids.shape[1]] = scores[0].float().log_softmax(-1)
        written = input_ids[0, len(self.job.prompt_ids) :]
        counts = torch.zeros_like(scores[0]).index_add_(0, written, torch.ones(len(written)))
        sampling = self.job.sampling
        return scores - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts


class Ticket:
    """An iterator of one job; `cancelled` once it was closed before its end."""

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop, over) -> None:
        self.job, self.over, self.cancelled = job, over, False
        self._loop, self._events, self._ended = loop, asyncio.Queue(), False

    def tell(self, event) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        self._ended = isinstance(event, JobDone | Exception)
        if isinstance(event, Exception):
            raise event
        return event

    async def aclose(self) -> None:
        if not self._ended:
            self._ended, self.cancelled = True, True
            self.over(self)


class StreamService:
    """See `sigma0.serve.messages.Service`.

    Attributes:
        limit: Jobs that may wait.
        gate: Tokens are written while it is set.
        tickets: All jobs that were submitted.
        fails: What the next job raises, if anything.
    """

    name = "pocket"

    def __init__(self, model, tokenizer, limit: int = 64) -> None:
        self.model, self.tokenizer, self.limit = model, tokenizer, limit
        self.gate = threading.Event()
        self.gate.set()
        self.tickets: list[Ticket] = []
        self.cancellations = threading.Semaphore(0)
        self.fails: Exception | None = None
        self._jobs: queue.Queue = queue.Queue()
        self._waiting, self._running, self._closed = 0, 0, False
        self._passes = self._rows = self._tokens = self._loops = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, job: Job):
        if self._waiting >= self.limit or self._closed:
            raise Busy("the queue is full")
        ticket = Ticket(job, asyncio.get_running_loop(), lambda _: self.cancellations.release())
        self.tickets.append(ticket)
        self._waiting += 1
        self._jobs.put(ticket)
        return ticket

    def status(self) -> ServiceStatus:
        counts = (self._passes, self._rows, self._tokens, self._loops)
        return ServiceStatus(self._waiting, self._running, *counts, 8, 0, 0, 0)

    async def drain(self) -> None:
        self._closed = True
        while self._waiting or self._running:
            await asyncio.sleep(0.005)

    def _work(self) -> None:
        while True:
            ticket = self._jobs.get()
            self._waiting, self._running = self._waiting - 1, 1
            failing, self.fails = self.fails, None
            try:
                if failing is not None:
                    raise failing
                self._run(ticket)
            except Exception as error:
                failed = JobFailed("a job failed")
                failed.__cause__ = error
                ticket.tell(failed)
            finally:
                self._running = 0

    def _run(self, ticket: Ticket) -> None:
        job, told = ticket.job, []
        scores, cut = Scores(job), StopCut(job.stop)
        stream = self._stream(job, scores)
        for number, token in enumerate(stream):
            while not self.gate.wait(0.005):
                if ticket.cancelled:
                    return
            if ticket.cancelled:
                return
            event = TokenTold(
                token.id, cut.feed(token.text), token.depth, token.reason, token.fate, token.proximity, token.margin,
                token.entropy, None, (), self.name,
            )  # fmt: skip
            if job.logprobs is not None:
                row = scores.at[len(job.prompt_ids) + number]
                top = row.topk(job.logprobs) if job.logprobs else None
                listed = () if top is None else zip(top.indices.tolist(), top.values.tolist(), strict=True)
                others = tuple(Alternative(*each) for each in listed)
                event = replace(event, logprob=float(row[token.id]), alternatives=others)
            told.append(event)
            ticket.tell(event)
        ticket.tell(self._done(job, stream.generation, told, cut))

    def _stream(self, job: Job, scores: Scores):
        asked = job.sampling
        drawn = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k, "min_p": asked.min_p}
        return sigma0.stream(
            self.model,
            Ids(self.tokenizer, job.prompt_ids),
            PROMPT,
            exit_config=job.exit_config,
            max_new_tokens=job.max_new_tokens,
            stop=job.stop,
            seed=asked.seed,
            sources=job.context,
            do_sample=asked.temperature > 0,
            repetition_penalty=asked.repetition_penalty,
            logits_processor=LogitsProcessorList([scores]),
            **(drawn if asked.temperature > 0 else {}),
        )

    def _done(self, job: Job, found, told, cut: StopCut) -> JobDone:
        rest = cut.flush()
        told[-1] = replace(told[-1], text=told[-1].text + rest)
        self._passes += found.loop_passes
        self._rows += found.loop_rows
        self._tokens += len(told)
        self._loops += sum(token.depth for token in told)
        judged = found.verdict is not None and switches().verdict
        return JobDone(
            text=cut.passed,
            tokens=tuple(told),
            finish_reason="length" if found.stop_reason == "length" else "stop",
            prompt_tokens=found.prompt_tokens,
            cached_tokens=0,
            total_loops=found.total_loops,
            passes=found.loop_passes,
            rows=found.loop_rows,
            savings=Savings(found.mean_depth, found.depth_saved, found.passes_saved, found.rows_saved),
            verdict=found.verdict,
            door=found.door,
            door_text=explain(found.verdict, found.policy) if judged else None,
        )


PROMPT = "the prompt of a job"


class Ids:
    """A tokenizer that takes one prompt for the ids it was given."""

    is_fast = True

    def __init__(self, tokenizer, ids) -> None:
        self._tokenizer, self._ids = tokenizer, ids

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, *more, **settings):
        return {"input_ids": torch.tensor([self._ids])} if text == PROMPT else self._tokenizer(text, *more, **settings)
