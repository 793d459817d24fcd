"""The fidelity ladder: what a small model cannot settle goes up to a larger one, within a hard budget."""

from typing import TYPE_CHECKING

from sigma0.lazy import lazy_names

if TYPE_CHECKING:
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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AllOf": "sigma0.ladder.triggers",
            "Always": "sigma0.ladder.triggers",
            "AnyOf": "sigma0.ladder.triggers",
            "Budget": "sigma0.ladder.budget",
            "Collapse": "sigma0.ladder.triggers",
            "Divergence": "sigma0.ladder.triggers",
            "Doubt": "sigma0.ladder.triggers",
            "EndpointRung": "sigma0.ladder.rungs",
            "Entropy": "sigma0.ladder.triggers",
            "FidelityLadder": "sigma0.ladder.ladder",
            "Hysteresis": "sigma0.ladder.triggers",
            "LadderGeneration": "sigma0.ladder.results",
            "LadderToken": "sigma0.ladder.results",
            "LocalRung": "sigma0.ladder.rungs",
            "Margin": "sigma0.ladder.triggers",
            "Never": "sigma0.ladder.triggers",
            "Price": "sigma0.ladder.budget",
            "Random": "sigma0.ladder.triggers",
            "Rung": "sigma0.ladder.rungs",
            "RungCost": "sigma0.ladder.budget",
            "Saturation": "sigma0.ladder.triggers",
            "ShutDoor": "sigma0.ladder.triggers",
            "Signs": "sigma0.ladder.triggers",
            "Spending": "sigma0.ladder.budget",
            "TokenRun": "sigma0.ladder.ladder",
            "Trail": "sigma0.ladder.trail",
            "Trigger": "sigma0.ladder.triggers",
            "Ungrounded": "sigma0.ladder.triggers",
            "read_trail": "sigma0.ladder.trail",
            "replay": "sigma0.ladder.trail",
        },
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
