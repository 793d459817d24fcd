"""Replicas that are servers of queueing theory: one request at a time, in a time that its prompt says."""

import numpy as np

from sigma0.bench.simulation.cluster import LONG, SHORT, Cluster, Crowd, Router, Traffic
from sigma0.bench.simulation.inputs import Kind, MeasuredAnswer
from sigma0.bench.simulation.replica import Replica, ReplicaLimits

MEAN = 200


def exponential():
    """Services of an exponential law, as rows of prompts: its quantiles at even distances."""
    shares = (np.arange(4000) + 0.5) / 4000
    return np.maximum(1, np.round(-MEAN * np.log(1 - shares))).astype(int)


def servers(count, prompts, load, routing="random", seed="a", traffic=None, waiting=10**9):
    """Replicas that answer one request at a time, in as many seconds as it has rows over the mean."""
    mean = float(np.mean(prompts))
    # any text is one block, and none of it is ever found again
    limits = ReplicaLimits(1, running=1, pass_rows=10**9, page=10**9, kept=10**9, waiting=waiting)
    replicas = [Replica(limits, lambda work: work.rows / mean) for _ in range(count)]
    asked = traffic or Traffic(turns=1.0, think=0.0, context=10**9)
    answers = tuple(MeasuredAnswer(prompt=int(rows), depths=(1,)) for rows in prompts)
    crowd = Crowd(dict.fromkeys((SHORT, LONG), Kind(exit_config={}, answers=answers)), asked, load * count, seed)
    return Cluster(replicas, Router(routing, replicas, max(1, count // 2), seed), crowd)
