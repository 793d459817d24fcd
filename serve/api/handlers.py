"""Request handlers: run the choices of a parsed request, and answer whole or as a stream of events."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from sigma0.commands.telemetry import TelemetryLog
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.errors import ApiError, as_api_error, busy
from sigma0.serve.api.events import ClientGone, RunningChoices, unless_gone
from sigma0.serve.api.metrics import Metrics
from sigma0.serve.api.outgoing import Outgoing
from sigma0.serve.api.requests import ParsedRequest
from sigma0.serve.api.responses import DONE, ResponseBuilder, encoded, server_sent
from sigma0.serve.api.telemetry import RequestTelemetry
from sigma0.serve.api.tracing import RequestSpan, Tracing
from sigma0.serve.api.turns import Backlog, Turns
from sigma0.serve.engine.messages import Busy, Service, TokenOutput

if TYPE_CHECKING:
    from sigma0.serve.api.ladder import LadderRunner

logger = logging.getLogger(__name__)
# seconds beyond the time limit of a request for its client to read the rest
SENDING = 5.0
# tokens and alternatives of a whole response from which on it is written in a thread: some milliseconds of work
LONG = 1024
# characters of the id of a request that its slot shows
SHOWN = 8
# status of a client that disconnected: only an access log reads it
GONE = 499


class RequestHandler:
    """Answers parsed requests.

    Args:
        service: The engine.
        settings: Limits.
        ladder_runner: The server's ladder, if it has one.
        metrics: Of the server.

    Attributes:
        draining: Whether no more requests are taken; `sigma0.serve.api.access.BodyLimit` refuses them then.
        open: Requests that are being answered.
        telemetry: Log with a line for each choice; None: no log.
        tracing: Makes a span for each request; None: no spans.
        stream_buffer: Bytes of an event with several tokens, about.
    """

    def __init__(
        self, service: Service, settings: ServerSettings, ladder_runner: "LadderRunner | None", metrics: Metrics
    ) -> None:
        self._service, self._settings, self._ladder_runner, self._metrics = service, settings, ladder_runner, metrics
        self.draining = False
        self.open = 0
        # as many as the largest request has, so that it is taken whenever nothing else waits
        self._backlog = Backlog(settings.max_n * settings.max_prompts)
        self.telemetry: TelemetryLog | None = None
        self.tracing: Tracing | None = None
        self.stream_buffer = settings.stream_buffer
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="writing")

    @contextmanager
    def room(self) -> Iterator[None]:
        """Counts a request that is being parsed among those that are being answered.

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

    async def handle(self, request: Request, parsed: ParsedRequest) -> Response:
        """The response to a request, or the start of its stream.

        Raises:
            ApiError: For a request that the engine refuses or fails at.
        """
        service = self._service
        builder = ResponseBuilder(parsed, service.name, service.tokenizer, service.model.num_loops)
        request_id = str(request.state.request_id)
        running = await self._start(parsed, request_id, request.headers)
        if parsed.stream:
            return EventStream(self, running, builder, request_id)
        try:
            with self._metrics.latency.time():
                response = await unless_gone(request.receive, self._whole(running, builder))
        except ClientGone:
            self._left(parsed)
            return Response(status_code=GONE)
        except asyncio.CancelledError:
            # a server in front may cancel the task when the client disconnects
            self._left(parsed)
            raise
        except Exception as error:
            raise as_api_error(error, request_id) from error
        finally:
            await running.close()
        self.count(parsed, 200)
        return response

    async def _whole(self, running: RunningChoices, builder: ResponseBuilder) -> Response:
        """The response once all choices are over; a long one is written in a thread."""
        ends = await running.all_done()
        values = sum(len(done.tokens) for done in ends) * (1 + (builder.parsed.choices[0].request.logprobs or 0))
        if values < LONG:
            return JSONResponse(builder.response(ends))
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._writing, lambda: b"".join(encoded(builder.response(ends))))
        return Response(body, media_type="application/json")

    async def close(self) -> None:
        """Ends its thread, and sends the last spans."""
        self._writing.shutdown(wait=False)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def _left(self, parsed: ParsedRequest) -> None:
        self.count(parsed, GONE)
        self._metrics.cancelled.inc()

    def count(self, parsed: ParsedRequest, status: int) -> None:
        """Counts a finished request by its kind and status."""
        self._metrics.requests.labels(parsed.kind, str(status)).inc()

    async def _start(self, parsed: ParsedRequest, request_id: str, headers: Mapping[str, str]) -> RunningChoices:
        observe = self._metrics.watch()
        watching: list[RequestTelemetry | RequestSpan] = []
        if self.telemetry is not None:
            loops = self._service.model.num_loops
            watching.append(RequestTelemetry(self.telemetry, parsed, request_id, self._service.name, loops))
        if self.tracing is not None:
            watching.append(self.tracing.begin(parsed, request_id, headers))
        for item in watching:
            observe = item.watch(observe)

        def over() -> None:
            for item in watching:
                item.close(running.failure)
            self._over()

        running = RunningChoices(self._settings.request_timeout, observe, over)
        self.open += 1
        turns = Turns(self._service, self._settings.max_at_once, self._backlog)
        try:
            for index, choice in enumerate(parsed.choices):
                if self._ladder_runner is not None and choice.task is not None and not choice.routed:
                    running.add(self._ladder_runner.run(choice.task))
                    continue
                engine = turns.add(replace(choice.request, id=f"{request_id[:SHOWN]}-{index}"))
                if self._ladder_runner is not None and choice.task is not None:
                    running.add(self._ladder_runner.route(engine, choice.task, self._metrics.judged), engine)
                else:
                    running.add(engine)
        except ValueError as error:
            running.failure = error
            await running.close()
            raise ApiError(400, str(error)) from error
        except Exception as error:
            running.failure = error
            await running.close()
            raise as_api_error(error, request_id) from error
        return running

    def _over(self) -> None:
        self.open -= 1


class EventStream(StreamingResponse):
    """A response of server-sent events; its choices are cancelled however it ends.

    Args:
        handler: Counts the response.
        running: Choices of the request.
        builder: Builds the chunks.
        request_id: Of the request.
    """

    def __init__(
        self, handler: RequestHandler, running: RunningChoices, builder: ResponseBuilder, request_id: str
    ) -> None:
        self._handler, self._running, self._builder, self._request_id = handler, running, builder, request_id
        self._status = GONE
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        try:
            with self._handler._metrics.latency.time():
                # a client that neither reads nor disconnects would keep its slot for ever
                await asyncio.wait_for(super().__call__(scope, receive, send), self._running.left + SENDING)
        finally:
            await self._running.close()
            self._handler.count(self._builder.parsed, self._status)
            if self._status == GONE:
                self._handler._metrics.cancelled.inc()

    async def _events(self) -> AsyncIterator[bytes]:
        builder, running = self._builder, self._running
        outgoing, waited = Outgoing(builder, self._handler.stream_buffer), False
        try:
            opening = b"".join(builder.opening())
            if opening:
                yield opening
            async with aclosing(running.events()) as events:
                async for index, event in events:
                    has_more = running.has_more
                    if isinstance(event, TokenOutput) and not (waited or has_more or outgoing.waiting):
                        # as nearly always
                        yield builder.tokens(index, (event,))
                    else:
                        outgoing.add(index, event)
                        if has_more:
                            continue
                        # what comes together is sent together
                        for piece in outgoing.take(is_slow=waited):
                            yield piece
                    # a send that is taken at once gives way to nobody: what is there after it came while it waited
                    waited = running.has_more
            # what came before an error that was never told, since all had ended by then
            for piece in outgoing.take(is_slow=waited):
                yield piece
            ends = outgoing.ends
            usage = [builder.usage([ends[index] for index in sorted(ends)])] if builder.parsed.include_usage else []
        except Exception as error:
            # the status line was sent long ago: the failure is an event, and ends the stream
            failure = as_api_error(error, self._request_id)
            self._status = failure.status_code
            for piece in outgoing.take(is_slow=waited):
                yield piece
            yield b"event: error\n" + server_sent(failure.body)
            return
        self._status = 200
        yield b"".join([*usage, DONE])
