"""The fidelity ladder: what a small model cannot settle goes up to a larger one, within a hard budget."""

from sigma0.ladder.budget import Budget, Price, RungCost, Spending
from sigma0.ladder.ladder import FidelityLadder, TokenRun
from sigma0.ladder.results import LadderGeneration, LadderToken
from sigma0.ladder.rungs import EndpointRung, LocalRung, Rung
from sigma0.ladder.trail import Trail, read_trail, replay
from sigma0.ladder.triggers import (
    AllOf,
    Always,
    AnyOf,
    Collapse,
    Divergence,
    Doubt,
    Entropy,
    Hysteresis,
    Margin,
    Never,
    Random,
    Saturation,
    ShutDoor,
    Signs,
    Trigger,
    Ungrounded,
)

__all__ = [
    "AllOf",
    "Always",
    "AnyOf",
    "Budget",
    "Collapse",
    "Divergence",
    "Doubt",
    "EndpointRung",
    "Entropy",
    "FidelityLadder",
    "Hysteresis",
    "LadderGeneration",
    "LadderToken",
    "LocalRung",
    "Margin",
    "Never",
    "Price",
    "Random",
    "Rung",
    "RungCost",
    "Saturation",
    "ShutDoor",
    "Signs",
    "Spending",
    "TokenRun",
    "Trail",
    "Trigger",
    "Ungrounded",
    "read_trail",
    "replay",
]
