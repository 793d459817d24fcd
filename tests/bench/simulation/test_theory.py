"""The simulated cluster against queueing theory, which knows nothing of it."""

import math
from itertools import pairwise

import numpy as np
import pytest

from tests.bench.simulation.test_cluster import MEAN, exponential, servers

SEEDS = "abcdef"
pytestmark = pytest.mark.exhaustive


def courses(*arguments, warm, measured, **more):
    return [servers(*arguments, seed=seed, **more).run(warm, measured) for seed in SEEDS]


def waits(course):
    return np.array([request.started - request.arrived for request in course.requests if not request.refused])


def agrees(values, known, within=0.08):
    """Means of independent runs agree with what is known: by their own spread, which is small."""
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    assert error < within * known, "too few requests to tell"
    assert abs(np.mean(values) - known) < 4 * error + 0.01 * known, (np.mean(values), error, known)


def erlang_c(count, load):
    offered = count * load
    free = sum(offered**busy / math.factorial(busy) for busy in range(count))
    full = offered**count / math.factorial(count) / (1 - load)
    return full / (free + full)


@pytest.mark.parametrize("count, load", [(1, 0.3), (1, 0.6), (1, 0.8), (8, 0.6)])
def test_exponential_servers_wait_as_m_m_1(count, load):
    """Each of many, too: random routing splits a Poisson stream into independent ones, as groups of a fleet are."""
    result = courses(count, exponential(), load, warm=500 * count, measured=12000)
    agrees([waits(course).mean() for course in result], load / (1 - load))
    agrees([course.busy for course in result], load)
    agrees([course.answered / course.seconds for course in result], count * load)
    # the whole law: P(wait > t) = load exp(-(1 - load) t)
    for moment in (0.0, 1.0, 3.0):
        known = load * math.exp(-(1 - load) * moment)
        agrees([(waits(course) > moment).mean() for course in result], known)
    # and its tail: the 99th percentile of the time from arrival to end is ln(100) / (1 - load)
    ends = [[request.ended - request.arrived for request in course.requests] for course in result]
    agrees([np.percentile(item, 99) for item in ends], math.log(100) / (1 - load), within=0.1)


@pytest.mark.parametrize("load", [0.6, 0.3, 0.8])
def test_one_constant_server_waits_as_m_d_1(load):
    result = courses(1, [MEAN], load, warm=500, measured=8000)
    agrees([waits(course).mean() for course in result], load / (2 * (1 - load)))


@pytest.mark.parametrize("count, load, measured", [(2, 0.6, 6000), (5, 0.8, 15000), (16, 0.9, 15000)])
def test_one_queue_before_several_servers_waits_as_m_m_c(count, load, measured):
    result = courses(count, exponential(), load, "one-queue", warm=measured // 8, measured=measured)
    chance = erlang_c(count, load)
    agrees([(waits(course) > 1e-9).mean() for course in result], chance)
    agrees([waits(course).mean() for course in result], chance / (count * (1 - load)), within=0.1)


@pytest.mark.parametrize(
    "count, routing, waiting",
    [(1, "random", 3), (1, "random", 0), (5, "one-queue", 0), (5, "least-loaded", 0), (5, "fleet", 0)],
)
def test_few_places_refuse_as_theory_says(count, routing, waiting):
    """One server with K places as M/M/1/K, several without a queue as M/M/c/c (Erlang B): P(all places are taken)."""
    offered, places = count * 0.8, count + waiting
    terms = [offered**inside / (math.factorial(inside) if count > 1 else 1) for inside in range(places + 1)]
    result = courses(count, exponential(), 0.8, routing, warm=200, measured=8000, waiting=waiting)
    refused = [np.mean([request.refused for request in course.requests]) for course in result]
    agrees(refused, terms[-1] / sum(terms))


def test_the_shorter_of_two_queues_is_as_long_as_the_mean_field_says():
    """Of very many servers a share load^(2^k - 1) has k requests at least: Mitzenmacher 2001, 10.1109/71.963420."""
    load, count = 0.8, 300
    inside = sum(load ** (2**level - 1) for level in range(1, 12))
    result = courses(count, exponential(), load, "two-choices", warm=20 * count, measured=30 * count)
    means = [np.mean([request.ended - request.arrived for request in course.requests]) for course in result]
    # by Little's law; a finite number of servers is off by the order of one over it
    agrees(means, inside / load)


def test_a_router_that_knows_more_lets_wait_less():
    """As known: one queue, then the shortest queue, then the shorter of two, then any."""
    order = ("one-queue", "least-loaded", "two-choices", "random")
    result = [waits(servers(8, exponential(), 0.8, routing).run(1000, 10000)).mean() for routing in order]
    assert result == sorted(result) and result[0] < 0.9 * result[1] and result[1] < 0.5 * result[3]


@pytest.mark.parametrize("routing", ["fleet", "random", "two-choices", "least-loaded", "one-queue", "depth-aware"])
def test_more_replicas_for_the_same_requests_never_let_wait_longer(routing):
    for seed in SEEDS[:2]:
        result = [
            waits(servers(count, exponential(), 3.2 / count, routing, seed).run(500, 4000)).mean()
            for count in (4, 6, 8, 16)
        ]
        # noise: what is nearly nothing may differ
        assert all(more <= fewer + 0.02 for fewer, more in pairwise(result)), result
        assert result[-1] < 0.6 * result[0]
