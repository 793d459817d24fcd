"""A simulated request: one text to be answered, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from sigma0.serve.engine.scheduler import SequenceEntry


@dataclass(slots=True, eq=False)
class Request:
    """One text to be answered.

    Attributes:
        prompt: Columns of its prompt, at least 1.
        depths: Exit depth of each new token, at least one.
        kind: Of the traffic that it belongs to.
        session: Number of the chat that it is a turn of.
        text: Ids of prompt and answer; None for made-up ones, which turns of its chat alone begin with.
        number: In the order of arrival.
        arrived: Seconds.
        started: When it was first admitted.
        first: When its first token was told.
        ended: When its last was.
        cached: Columns of the prompt that were found.
        told: Tokens so far.
        refused: Whether it found everything full and went away.
        entry: Its sequence in the scheduler.
        saved: Loops of its tokens in flight when it was preempted, by position; None once they are in flight again.
    """

    prompt: int
    depths: tuple[int, ...]
    kind: str = ""
    session: int = -1
    text: Sequence[int] | None = None
    number: int = -1
    arrived: float = 0.0
    started: float = -1.0
    first: float = -1.0
    ended: float = -1.0
    cached: int = 0
    told: int = 0
    refused: bool = False
    entry: SequenceEntry | None = None
    saved: dict[int, int] | None = None

    @property
    def sequence(self) -> SequenceEntry:
        """Its sequence in the scheduler, once it has one."""
        assert self.entry is not None, "a request that was never queued"
        return self.entry
