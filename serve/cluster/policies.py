"""Policies that Serve runs in processes of its own: the number of replicas, and the replica of a request.

Nothing of sigma0 is imported here: Serve's controller, which runs the autoscaling policy, should load no model code.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class EngineLoad:
    """Autoscaling policy: enough replicas for the requests, and for the rows of their passes.

    Requests are counted by Serve, those in an engine's queue included; rows per pass are reported by replicas
    (`record_autoscaling_stats`). Delays, factors and bounds are the autoscaling configuration's.

    Args:
        requests: Target number of requests of one replica.
        rows: Target number of rows in a pass of one replica.
    """

    def __init__(self, requests: float, rows: float) -> None:
        self._requests = requests
        self._rows = rows

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas, to be rounded up.

        Args:
            context: A `ray.serve.config.AutoscalingContext`.

        Returns:
            The number, and an empty state.
        """
        rows = (context.aggregated_metrics or {}).get("rows", {})
        return max(context.total_num_requests / self._requests, sum(rows.values()) / self._rows), {}


class NamedReplica(RequestRouter):  # type: ignore[misc]
    """Request router: to the replica whose name is the request's `session_id`.

    Where that one is gone or full, to the others; the first event of a request names the replica that took it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named replica, then the others."""
        if pending_request is None:
            return [candidate_replicas]
        # without it a request that no replica takes would be routed again and again without a pause
        pending_request.routing_context.should_backoff = True
        name = pending_request.metadata.session_id
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        others = [replica for replica in candidate_replicas if replica.replica_id.unique_id != name]
        return [ranked for ranked in (named, others) if ranked]
