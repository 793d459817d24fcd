"""Looped families as Hugging Face classes, each imported when it is first used."""

import sys
from typing import TYPE_CHECKING, Any, Literal

from sigma0.lazy import lazy_names

if TYPE_CHECKING:
    from sigma0.models.nanbeige import NanbeigeForCausalLM, NanbeigeModel
    from sigma0.models.nanbeige_config import NanbeigeConfig
    from sigma0.models.ouro import OuroForCausalLM, OuroModel
    from sigma0.models.ouro_config import OuroConfig
    from sigma0.models.raven import RavenModel
    from sigma0.models.raven_causal import RavenForCausalLM
    from sigma0.models.raven_config import RavenConfig

# The classes of each `model_type`, `MODULE.CLASS` in this folder; all else finds a family here.
FAMILIES: dict[str, dict[str, str]] = {
    "ouro": {"config": "ouro_config.OuroConfig", "base": "ouro.OuroModel", "causal": "ouro.OuroForCausalLM"},
    "nanbeige": {
        "config": "nanbeige_config.NanbeigeConfig",
        "base": "nanbeige.NanbeigeModel",
        "causal": "nanbeige.NanbeigeForCausalLM",
    },
    "huginn_raven": {
        "config": "raven_config.RavenConfig",
        "base": "raven.RavenModel",
        "causal": "raven_causal.RavenForCausalLM",
    },
}
if not TYPE_CHECKING:
    _paths = [path.split(".") for paths in FAMILIES.values() for path in paths.values()]
    __getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{module}" for module, name in _paths})


def family_class(model_type: str, kind: Literal["config", "base", "causal"]) -> Any:
    """A class of a family, imported now: its config, its model, or its model with a head."""
    return getattr(sys.modules[__name__], FAMILIES[model_type][kind].partition(".")[2])


__all__ = [
    "FAMILIES",
    "NanbeigeConfig",
    "NanbeigeForCausalLM",
    "NanbeigeModel",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "RavenConfig",
    "RavenForCausalLM",
    "RavenModel",
    "family_class",
]
