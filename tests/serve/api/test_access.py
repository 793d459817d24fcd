"""Bodies are bounded one by one and all together, and what one request held is given back."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from sigma0.serve.api.access import BODIES_AT_ONCE, BodyLimit
from sigma0.serve.api.errors import ApiError

SCOPE = {"type": "http", "headers": [], "path": "/", "method": "POST"}
PART = {"type": "http.request", "body": b"x" * 10, "more_body": True}


def test_bodies_that_are_never_finished_do_not_pile_up():
    """As many as fit wait; one more is asked to come back, and has a place once the others have left."""

    async def run():
        release = asyncio.Event()
        refused = []

        async def app(scope, receive, send):
            try:
                await receive()
            except ApiError as error:
                refused.append(error)
                return
            await release.wait()

        async def receive():
            return PART

        limit = BodyLimit(app, 10)
        tasks = [asyncio.create_task(limit(SCOPE, receive, None)) for _ in range(BODIES_AT_ONCE)]
        await asyncio.sleep(0)
        assert not refused
        await limit(SCOPE, receive, None)
        assert [error.status_code for error in refused] == [429] and "Retry-After" in refused[0].headers
        release.set()
        await asyncio.gather(*tasks)
        await limit(SCOPE, receive, None)
        assert len(refused) == 1 and limit._held == 0

    asyncio.run(run())


def test_a_whole_body_is_not_held_any_more():
    async def run():
        seen = []

        async def app(scope, receive, send):
            await receive()
            seen.append(limit._held)

        async def receive():
            return {**PART, "more_body": False}

        limit = BodyLimit(app, 10)
        await limit(SCOPE, receive, None)
        assert seen == [0]

    asyncio.run(run())
