"""Threads for one kind of work, and a limit on how much of it may wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from sigma0.serve.engine.messages import Busy

P = ParamSpec("P")
T = TypeVar("T")


class BoundedPool:
    """Runs functions in threads of its own, so that what floods it keeps no other thread busy.

    Args:
        name: Of the threads.
        threads: How many.
        limit: Calls that run or wait at most.
    """

    def __init__(self, name: str, threads: int, limit: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._limit = limit
        self._open = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns.

        Raises:
            Busy: If too many calls wait already.
        """
        if self._open >= self._limit:
            raise Busy(f"{self._open} requests are being read already")
        loop = asyncio.get_running_loop()
        self._open += 1
        # counted until it is over, also where nobody waits for it any more
        future = self._executor.submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: self._over(loop))
        return await asyncio.wrap_future(future)

    def _over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called in one of its threads, or where a call that did not begin is cancelled."""
        try:
            loop.call_soon_threadsafe(self._count_down)
        except RuntimeError:
            # the loop is closed: whoever asked is gone with it
            self._count_down()

    def _count_down(self) -> None:
        self._open -= 1

    def close(self) -> None:
        """Ends its threads once they are done with what they are at; what waits is not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)
