"""A Ray Serve application of sigma0: one front, and replicas with an engine each.

`serve run serve/serve.yaml` builds it by `build`, `sigma0 serve --ray` by way of `sigma0.serve.cluster.command`.
"""

import math
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from sigma0.serve.api.handlers import SENDING
from sigma0.serve.cluster.front import Front
from sigma0.serve.cluster.replica import EngineReplica
from sigma0.serve.cluster.settings import RaySettings

NAME = "sigma0"
# Serve is to hold nothing back: the front refuses what is too much, and so does each engine, in OpenAI's shape.
NO_LIMIT = 10_000


def build(settings: RaySettings) -> Application:
    """The application.

    Args:
        settings: Arguments of the configuration file, or of the command.
    """
    return application(settings, EngineReplica)


def application(settings: RaySettings, replica: type[EngineReplica]) -> Application:
    """The application with replicas of a class.

    Args:
        settings: Of the application.
        replica: What each replica's process holds.
    """
    # as long as a request may take, and its client to read the last of it
    ending = math.ceil(settings.request_timeout + 2 * SENDING)
    common: dict[str, Any] = {
        "max_ongoing_requests": NO_LIMIT,
        "graceful_shutdown_timeout_s": ending,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5,
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
    }
    engines = serve.deployment(replica).options(
        name="engine",
        ray_actor_options=settings.claims,
        request_router_config=RequestRouterConfig(request_router_class="sigma0.serve.cluster.policies.NamedReplica"),
        **scaling_of(settings),
        **common,
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name="front", num_replicas=1, ray_actor_options={"num_cpus": 0}, **common
    )
    return front.bind(engines.bind(settings), settings)


def scaling_of(settings: RaySettings) -> dict[str, Any]:
    """How many replicas there are, as a deployment's options."""
    least, most = settings.bounds
    if least == most:
        return {"num_replicas": least}
    jobs = settings.target_jobs or 0.75 * settings.max_running
    rows = settings.target_rows or settings.pass_rows
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        target_ongoing_requests=jobs,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        policy={
            "policy_function": "sigma0.serve.cluster.scaling.EngineLoad",
            "policy_kwargs": {"jobs": jobs, "rows": rows},
        },
    )
    return {"num_replicas": None, "autoscaling_config": scaling}
