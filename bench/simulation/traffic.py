"""Who asks: chats that begin at random, each with some turns, drawn from measured answers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from sigma0.bench.simulation.inputs import Kind
from sigma0.bench.simulation.replica import Request

SHORT, LONG = "short", "long"


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Traffic:
    """What is assumed of users: none of it is measured.

    Attributes:
        short_share: Share of chats whose tokens may stop early; the others are answered at full depth.
        turns: Mean turns of a chat, geometric.
        think: Mean seconds from an answer to the next turn, exponential.
        context: Columns that a chat ends at.
    """

    short_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    turns: Annotated[float, Field(ge=1)] = 3.0
    think: Annotated[float, Field(ge=0)] = 5.0
    context: Annotated[int, Field(ge=1)] = 2048


@dataclass
class Chat:
    """A chat under way.

    Attributes:
        number: Of the chat.
        kind: Of its traffic.
        columns: Of all turns so far.
    """

    number: int
    kind: str
    columns: int = 0


class Crowd:
    """Draws chats and their turns.

    Args:
        kinds: Measured answers by kind of traffic.
        traffic: What is assumed of users.
        rate: Requests a second, turns counted; chats begin as a Poisson process.
        rng: Of the draws.
    """

    def __init__(self, kinds: Mapping[str, Kind], traffic: Traffic, rate: float, rng: Random) -> None:
        if not rate > 0:
            raise ValueError(f"the rate must be above 0 requests a second, got {rate}")
        self.traffic = traffic
        self._kinds = kinds
        self._chats_per_second = rate / traffic.turns
        self._rng = rng
        self._count = 0

    def wait(self) -> float:
        """Seconds to the beginning of the next chat."""
        return self._rng.expovariate(self._chats_per_second)

    def begin(self) -> Chat:
        """The next chat."""
        self._count += 1
        kind = SHORT if self._rng.random() < self.traffic.short_share else LONG
        return Chat(self._count, kind)

    def under_way(self) -> Iterator[tuple[Chat, float]]:
        """Chats that are between two turns before the first one begins, and the seconds to their next turn.

        Turns and thinking have no memory, so a chat that is found thinking has had a geometric number of turns and has
        as long to think as one that has just begun to: a crowd that has been there for ever, but for answers under way.
        """
        traffic = self.traffic
        mean = self._chats_per_second * (traffic.turns - 1) * traffic.think
        # a Poisson number of them: as many as exponential steps of mean 1 fit into `mean`
        passed = self._rng.expovariate(1)
        while passed < mean:
            passed += self._rng.expovariate(1)
            chat = self.begin()
            self.turn(chat)
            while self._rng.random() * traffic.turns >= 1:
                self.turn(chat)
            if chat.columns < traffic.context:
                yield chat, self._rng.expovariate(1 / traffic.think)

    def turn(self, chat: Chat) -> Request:
        """Its next request: a measured prompt behind all that was said before, answered with measured depths."""
        answers = self._kinds[chat.kind].answers
        answer = answers[self._rng.randrange(len(answers))]
        request = Request(chat.columns + answer.prompt, answer.depths, chat.kind, chat.number)
        chat.columns += answer.prompt + len(answer.depths)
        return request

    def think(self, chat: Chat) -> float | None:
        """Seconds until the next turn; None where the chat ends."""
        if chat.columns >= self.traffic.context or self._rng.random() * self.traffic.turns < 1:
            return None
        return self._rng.expovariate(1 / self.traffic.think) if self.traffic.think else 0.0
