"""What of a stream is not sent yet: an event for each token, and one for many where the client reads slowly.

While a client does not read, its tokens wait as they came from the engine, so that what is held for it is as long as
its answer, and of that only what fits into one event is written ahead.
"""

from collections.abc import Iterator, Sequence

from sigma0.serve.api.responses import ResponseBuilder
from sigma0.serve.engine.messages import RequestOutput, TokenOutput

# Bytes that a token, and each log-probability beside it, take in an event; names of rungs and texts are short.
TOKEN_BYTES, LOGPROB_BYTES = 320, 128


class Outgoing:
    """Events of one stream that wait to be sent.

    Args:
        builder: Builds the chunks.
        limit: Bytes of a piece, about.

    Attributes:
        waiting: Events that were added since the last `take`, each with the index of its choice.
        ends: Outputs of the choices that are over, by index.
    """

    def __init__(self, builder: ResponseBuilder, limit: int) -> None:
        self._builder, self._limit = builder, limit
        self.waiting: list[tuple[int, TokenOutput | RequestOutput]] = []
        wanted = builder.parsed.choices[0].request.logprobs
        item = TOKEN_BYTES + (0 if wanted is None else (1 + wanted) * LOGPROB_BYTES)
        self._most = max(1, limit // item)
        self.ends: dict[int, RequestOutput] = {}

    def add(self, index: int, event: TokenOutput | RequestOutput) -> None:
        """Adds an event of a choice."""
        self.waiting.append((index, event))
        if isinstance(event, RequestOutput):
            self.ends[index] = event

    def take(self, is_slow: bool) -> Iterator[bytes]:
        """All that waits, in pieces that are to be sent one by one.

        Args:
            is_slow: Whether the client reads slowly: tokens of a choice then share an event. Else each has its own, and
                a piece is many events.
        """
        waiting, self.waiting = self.waiting, []
        if is_slow:
            yield from self._joined(waiting)
            return
        chunks: list[bytes] = []
        size = 0
        for index, event in waiting:
            if size >= self._limit:
                yield b"".join(chunks)
                chunks, size = [], 0
            if isinstance(event, TokenOutput):
                chunks.append(self._builder.tokens(index, (event,)))
            else:
                chunks += self._builder.end(index, event)
            size += len(chunks[-1])
        if chunks:
            yield b"".join(chunks)

    def _joined(self, waiting: Sequence[tuple[int, TokenOutput | RequestOutput]]) -> Iterator[bytes]:
        tokens: dict[int, list[TokenOutput]] = {}
        for index, event in waiting:
            if isinstance(event, TokenOutput):
                tokens.setdefault(index, []).append(event)
        for index, current in tokens.items():
            for start in range(0, len(current), self._most):
                yield self._builder.tokens(index, current[start : start + self._most])
        for index, event in waiting:
            if isinstance(event, RequestOutput):
                yield from self._builder.end(index, event)
