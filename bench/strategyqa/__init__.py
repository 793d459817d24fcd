"""Levels of control, L0 to L5, on StrategyQA."""

from sigma0.bench.strategyqa.registry import EXPERIMENTS, Makings

__all__ = ["EXPERIMENTS", "Makings"]
