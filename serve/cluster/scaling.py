"""How many replicas there are to be; run by Serve's controller, which is to load no sigma0: none is imported here."""

from typing import Any


class EngineLoad:
    """Serve's autoscaling policy: as many replicas as carry the jobs, and as many as carry the rows of their passes.

    Jobs are counted by Serve, those that wait in an engine's queue included; rows in a pass are what replicas tell
    (`record_autoscaling_stats`). Delays, factors and bounds are the autoscaling configuration's.

    Args:
        jobs: That one replica should have.
        rows: That one replica's passes should have.
    """

    def __init__(self, jobs: float, rows: float) -> None:
        self._jobs = jobs
        self._rows = rows

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas, to be rounded up.

        Args:
            context: Of `ray.serve.config.AutoscalingContext`.

        Returns:
            It, and a state that is empty.
        """
        rows = (context.aggregated_metrics or {}).get("rows", {})
        return max(context.total_num_requests / self._jobs, sum(rows.values()) / self._rows), {}
