"""Who has least to do, kept up to date: a choice among ten thousand replicas takes as long as one among ten."""

from collections.abc import Sequence
from random import Random


class LoadTable:
    """Numbers by their loads.

    Args:
        numbers: All of them, with nothing to do.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._by_load: list[list[int]] = [list(numbers)]
        self._place = {number: place for place, number in enumerate(numbers)}
        self._load = dict.fromkeys(numbers, 0)
        self._least = 0

    @property
    def least(self) -> int:
        """The least load of any."""
        return self._least

    def one_of_least(self, rng: Random) -> int:
        """A number with the least load, drawn where there are several."""
        equal = self._by_load[self._least]
        return equal[int(rng.random() * len(equal))]

    def put(self, number: int, load: int) -> None:
        """Notes the load of a number."""
        before = self._by_load[self._load[number]]
        last, place = before.pop(), self._place[number]
        if last != number:
            before[place], self._place[last] = last, place
        while len(self._by_load) <= load:
            self._by_load.append([])
        self._place[number] = len(self._by_load[load])
        self._by_load[load].append(number)
        self._load[number] = load
        self._least = min(self._least, load)
        while not self._by_load[self._least]:
            self._least += 1
