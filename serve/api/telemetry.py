"""Telemetry: one line for each choice of a request, finished, failed or cancelled."""

import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any

from sigma0.commands.telemetry import Costs, RequestLine, Route, TelemetryLog
from sigma0.serve.api.requests import Choice, ParsedRequest
from sigma0.serve.api.tool_parsers import finish_reason_of
from sigma0.serve.engine.messages import RequestOutput, TokenOutput

Event = TokenOutput | RequestOutput


class RequestTelemetry:
    """Collects the events of one request, and writes its lines at the end.

    Args:
        log: Telemetry log.
        parsed: The request.
        request_id: Its id.
        model: Name of the served model.
        total_loops: T.
    """

    def __init__(self, log: TelemetryLog, parsed: ParsedRequest, request_id: str, model: str, total_loops: int) -> None:
        self._log, self._parsed, self._request_id = log, parsed, request_id
        self._model, self._total_loops = model, total_loops
        self._began = time.monotonic()
        self._first: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._tokens: dict[int, list[TokenOutput]] = {index: [] for index in range(len(parsed.choices))}
        self._done: dict[int, RequestOutput] = {}

    def watch(self, observe: Callable[[int, Event], None]) -> Callable[[int, Event], None]:
        """An observer of the request's events that also calls `observe`."""

        def both(index: int, event: Event) -> None:
            self._record(index, event)
            observe(index, event)

        return both

    def _record(self, index: int, event: Event) -> None:
        since = time.monotonic() - self._began
        if isinstance(event, RequestOutput):
            self._done[index], self._seconds[index] = event, since
            return
        self._first.setdefault(index, since)
        self._tokens[index].append(event)

    def close(self, failure: Exception | None) -> None:
        """Writes the lines.

        Args:
            failure: The exception that ended the request; None where it finished, or its client disconnected.
        """
        ended, over = datetime.now(timezone.utc), time.monotonic() - self._began
        for index, choice in enumerate(self._parsed.choices):
            self._log.write(partial(self._line, index, choice, ended, over, failure))

    def _line(self, index: int, choice: Choice, ended: datetime, over: float, failure: Exception | None) -> RequestLine:
        done = self._done.get(index)
        tokens = tuple(self._tokens[index]) if done is None else done.tokens
        rungs = () if done is None else done.costs
        by_rung = Counter(token.rung for token in tokens)
        if not tokens:
            by_rung.update({rung["name"]: rung["tokens"] for rung in rungs if rung["tokens"]})
        spent: dict[str, Any] = {}
        ending: dict[str, Any] = {}
        if done is not None:
            spent = {**vars(done.savings), "passes": done.passes, "rows": done.rows, "preemptions": done.preemptions}
            spent["tokens_forced"] = done.tokens_forced
            ending = {
                "finish_reason": finish_reason_of(self._parsed.calls, done),
                "cached_tokens": done.cached_tokens,
                "verdict": done.verdict,
                "door": done.door,
            }
        return RequestLine(
            time=ended,
            request_id=self._request_id,
            choice=index,
            kind=self._parsed.kind,
            model=self._model,
            stream=self._parsed.stream,
            outcome="done" if done is not None else "cancelled" if failure is None else "failed",
            error=None if failure is None or done is not None else type(failure).__name__,
            prompt_tokens=len(choice.request.prompt_ids),
            new_tokens=sum(by_rung.values()),
            total_loops=self._total_loops,
            exit=choice.request.exit_config,
            effort=self._parsed.effort,
            depths=tuple(token.depth for token in tokens),
            reasons=tuple(token.reason for token in tokens),
            proximity=tuple(token.proximity for token in tokens),
            route=self._route(choice, by_rung, tokens, done),
            costs=Costs(
                seconds=self._seconds.get(index, over),
                first_token_seconds=self._first.get(index),
                large_model_tokens=sum(rung["tokens"] for rung in rungs[1:]),
                rungs=rungs,
                **spent,
            ),
            **ending,
        )

    def _route(
        self, choice: Choice, by_rung: Counter[str], tokens: tuple[TokenOutput, ...], done: RequestOutput | None
    ) -> Route:
        why = {token.handed_up: None for token in tokens if token.handed_up is not None}
        climbed = done is not None and bool(done.costs)
        if choice.task is None or (choice.routed and not climbed):
            return Route(kind="engine", rungs=dict(by_rung), why=tuple(why))
        if choice.routed and done is not None and done.door_text is not None:
            why[done.door_text] = None
        return Route(
            kind="routed" if choice.routed else "ladder",
            unit=choice.task.unit,
            rungs=dict(by_rung),
            why=tuple(why),
            top_rung=done is not None and done.top_rung,
        )
