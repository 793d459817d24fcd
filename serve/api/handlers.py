"""From a plan to an HTTP answer: jobs are opened, told whole or as they come, and cancelled when the client leaves."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from sigma0.commands.telemetry import TelemetryLog
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.errors import ApiError, as_api_error, busy
from sigma0.serve.api.events import ClientGone, RunningChoices, unless_gone
from sigma0.serve.api.ladder import LadderRunner
from sigma0.serve.api.metrics import Metrics
from sigma0.serve.api.requests import ParsedRequest
from sigma0.serve.api.responses import ResponseBuilder
from sigma0.serve.api.telemetry import RequestTelemetry
from sigma0.serve.api.turns import Backlog, Turns
from sigma0.serve.engine.messages import Busy, RequestOutput, Service, TokenOutput

logger = logging.getLogger(__name__)
# seconds beyond those of the request in which a client is to read what was written
SENDING = 5.0
# of the client that left: nobody reads it, but an access log
GONE = 499


class RequestHandler:
    """Answers plans.

    Args:
        service: The engine.
        settings: Limits.
        laddering: The server's ladder, if it has one.
        metrics: Take what happens.

    Attributes:
        draining: Whether nothing more is taken; it is `sigma0.serve.api.access.BodyLimit` that refuses then.
        open: Requests that are being answered.
        telemetry: Takes a line for each choice; None: nothing is kept of them.
    """

    def __init__(
        self, service: Service, settings: ServerSettings, laddering: LadderRunner | None, metrics: Metrics
    ) -> None:
        self._service, self._settings, self._laddering, self._metrics = service, settings, laddering, metrics
        self.draining = False
        self.open = 0
        # as many as the largest request has, which is so let in whenever nothing else waits
        self._backlog = Backlog(settings.max_n * settings.max_prompts)
        self.telemetry: TelemetryLog | None = None

    @contextmanager
    def room(self) -> Iterator[None]:
        """Counts a request that is being taken apart among those that are being answered.

        Raises:
            ApiError: 429 where too many are being answered.
        """
        if self.open >= self._settings.max_concurrent:
            raise busy(Busy(f"{self.open} requests are being answered already"))
        self.open += 1
        try:
            yield
        finally:
            self._over()

    async def answer(self, request: Request, plan: ParsedRequest) -> Response:
        """The response to a request that was let in, or the beginning of its stream.

        Raises:
            ApiError: For what the engine refuses or fails at.
        """
        teller = ResponseBuilder(plan, self._service.name, self._service.tokenizer, int(self._service.model.num_loops))
        request_id = str(request.state.request_id)
        running = await self._start(plan, request_id)
        if plan.stream:
            return EventStream(self, running, teller, request_id)
        try:
            with self._metrics.latency.time():
                ends = await unless_gone(request.receive, running.all_done())
        except ClientGone:
            self._left(plan)
            return Response(status_code=GONE)
        except asyncio.CancelledError:
            # a server in front may tell it so
            self._left(plan)
            raise
        except Exception as error:
            raise as_api_error(error, request_id) from error
        finally:
            await running.close()
        self.count(plan, 200)
        return JSONResponse(teller.response(ends))

    def _left(self, plan: ParsedRequest) -> None:
        self.count(plan, GONE)
        self._metrics.cancelled.inc()

    def count(self, plan: ParsedRequest, status: int) -> None:
        """Notes that a plan came to its end."""
        self._metrics.requests.labels(plan.kind, str(status)).inc()

    async def _start(self, plan: ParsedRequest, request_id: str) -> RunningChoices:
        observe, over = self._metrics.watch(), self._over
        if self.telemetry is not None:
            loops = int(self._service.model.num_loops)
            telemetry = RequestTelemetry(self.telemetry, plan, request_id, self._service.name, loops)
            observe = telemetry.watch(observe)

            def over() -> None:
                telemetry.close(running.failure)
                self._over()

        running = RunningChoices(self._settings.request_timeout, observe, over)
        self.open += 1
        turns = Turns(self._service, self._settings.max_at_once, self._backlog)
        try:
            for choice in plan.choices:
                if self._laddering is not None and choice.task is not None and not choice.routed:
                    running.add(self._laddering.run(choice.task))
                    continue
                engine = turns.add(choice.job)
                if self._laddering is not None and choice.task is not None:
                    running.add(self._laddering.route(engine, choice.task), engine)
                else:
                    running.add(engine)
        except ValueError as error:
            await running.close()
            raise ApiError(400, str(error)) from error
        except Exception as error:
            await running.close()
            raise as_api_error(error, request_id) from error
        return running

    def _over(self) -> None:
        self.open -= 1


class EventStream(StreamingResponse):
    """A response in server-sent events; whatever becomes of it, its jobs end with it.

    Args:
        answerer: Counts it.
        running: Its jobs.
        teller: Tells them.
        request_id: Of the request.
    """

    def __init__(
        self, answerer: RequestHandler, running: RunningChoices, teller: ResponseBuilder, request_id: str
    ) -> None:
        self._answerer, self._running, self._teller, self._request_id = answerer, running, teller, request_id
        self._status = GONE
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        try:
            with self._answerer._metrics.latency.time():
                # a client that stays and does not read would hold its place for ever
                await asyncio.wait_for(super().__call__(scope, receive, send), self._running.left + SENDING)
        finally:
            await self._running.close()
            self._answerer.count(self._teller.plan, self._status)
            if self._status == GONE:
                self._answerer._metrics.cancelled.inc()

    async def _events(self) -> AsyncIterator[bytes]:
        teller = self._teller
        ends: dict[int, RequestOutput] = {}
        try:
            for chunk in teller.opening():
                yield _data(chunk)
            async with aclosing(self._running.events()) as events:
                async for index, event in events:
                    if isinstance(event, TokenOutput):
                        yield _data(teller.token(index, event))
                        continue
                    ends[index] = event
                    for chunk in teller.end(index, event):
                        yield _data(chunk)
            if teller.plan.include_usage:
                yield _data(teller.usage([ends[index] for index in sorted(ends)]))
        except Exception as error:
            # the status was sent long ago: what went wrong is an event, and ends the stream
            told = as_api_error(error, self._request_id)
            self._status = told.status_code
            yield b"event: error\n" + _data(told.body)
            return
        self._status = 200
        yield b"data: [DONE]\n\n"


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"
