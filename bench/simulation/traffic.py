"""Who asks: chats that begin at random, each with some turns, drawn from measured answers.

All of a chat is drawn when it begins, by a generator of its own: so the same chats come under every routing, with the
same turns at the same moments but for the time that their earlier answers took.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from sigma0.bench.simulation.inputs import Kind, MeasuredAnswer
from sigma0.bench.simulation.replica import Request

SHORT, LONG = "short", "long"


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Traffic:
    """What is assumed of users: none of it is measured."""

    # Share of chats whose tokens may stop early; the others are answered at full depth
    short_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    turns: Annotated[float, Field(ge=1)] = 3.0  # Mean turns of a chat, geometric
    think: Annotated[float, Field(ge=0)] = 5.0  # Mean seconds from an answer to the next turn, exponential
    context: Annotated[int, Field(ge=1)] = 2048  # Columns that a chat ends at


@dataclass(slots=True)
class Chat:
    """A chat under way, with the columns of all its turns so far.

    Of the turns to come, the next one last: what is asked, and the seconds from the answer before to it.
    """

    number: int
    kind: str
    columns: int
    turns: list[tuple[MeasuredAnswer, float]]


class Crowd:
    """Draws chats and their turns.

    It asks `rate` requests a second, turns counted; chats begin as a Poisson process.
    """

    def __init__(self, kinds: Mapping[str, Kind], traffic: Traffic, rate: float, seed: str) -> None:
        asked = {SHORT: traffic.short_share > 0, LONG: traffic.short_share < 1}
        missing = [kind for kind, is_asked in asked.items() if is_asked and kind not in kinds]
        if missing:
            raise ValueError(
                f"the inputs hold no answers of {missing[0]!r} traffic, only of {', '.join(kinds)}: "
                "measure them, or ask for none of it with short_share 0 or 1"
            )
        self.traffic = traffic
        self._kinds = kinds
        self._chats_per_second = rate / traffic.turns
        self._seed = seed
        self._begins = Random(f"{seed}/begins")
        self._count = 0

    def wait(self) -> float:
        """Seconds to the beginning of the next chat."""
        return self._begins.expovariate(1) / self._chats_per_second

    def begin(self) -> Chat:
        """The next chat."""
        self._count += 1
        return self._chat(2 * self._count, f"{self._seed}/{self._count}")

    def _chat(self, number: int, seed: str, has_begun: bool = False) -> Chat:
        """A chat with all its turns; if it has begun, one of them at least is over, and perhaps all are."""
        rng, traffic = Random(seed), self.traffic
        kind = SHORT if rng.random() < traffic.short_share else LONG
        answers = self._kinds[kind].answers
        chat, columns = Chat(number, kind, 0, []), 0
        over = int(has_begun)
        while has_begun and rng.random() * traffic.turns >= 1:
            over += 1
        while columns < traffic.context:
            answer = answers[rng.randrange(len(answers))]
            columns += answer.prompt + len(answer.depths)
            if over:
                over, chat.columns = over - 1, columns
                continue
            chat.turns.append((answer, rng.expovariate(1) * traffic.think))
            if rng.random() * traffic.turns < 1:
                break
        chat.turns.reverse()
        return chat

    def under_way(self) -> Iterator[tuple[Chat, float]]:
        """Chats that are between two turns before the first one begins, and the seconds to their next turn.

        Turns and thinking have no memory, so a chat that is found thinking has had a geometric number of turns and has
        as long to think as one that has just begun to: a crowd that has been there for ever, but for answers under way.
        """
        traffic, rng = self.traffic, Random(f"{self._seed}/under way")
        mean = self._chats_per_second * (traffic.turns - 1) * traffic.think
        # a Poisson number of them: as many as exponential steps of mean 1 fit into `mean`
        passed, number = rng.expovariate(1), 0
        while passed < mean:
            passed, number = passed + rng.expovariate(1), number + 1
            chat = self._chat(2 * number - 1, f"{self._seed}/under way/{number}", has_begun=True)
            if chat.turns:
                yield chat, chat.turns[-1][1]

    def turn(self, chat: Chat) -> Request:
        """Its next request: a measured prompt after all that was said before, answered with measured depths."""
        answer, _ = chat.turns.pop()
        request = Request(chat.columns + answer.prompt, answer.depths, chat.kind, chat.number)
        chat.columns += answer.prompt + len(answer.depths)
        return request
