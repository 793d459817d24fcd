"""Serve's request router: a job goes to the replica that it names."""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedReplica(RequestRouter):  # type: ignore[misc]
    """Routes to the replica whose name is the request's `session_id`.

    Where that one is gone or takes no more, to the others; which one it came to, the replica tells itself.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that is named, then the others."""
        if pending_request is None:
            return [candidate_replicas]
        # without it a request that none takes would be routed again and again without a pause
        pending_request.routing_context.should_backoff = True
        name = pending_request.metadata.session_id
        named = [each for each in candidate_replicas if each.replica_id.unique_id == name]
        others = [each for each in candidate_replicas if each.replica_id.unique_id != name]
        return [ranked for ranked in (named, others) if ranked]
