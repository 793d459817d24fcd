"""LoopOutput families as Hugging Face classes, each imported when it is first used."""

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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "NanbeigeConfig": "sigma0.models.nanbeige_config",
            "NanbeigeForCausalLM": "sigma0.models.nanbeige",
            "NanbeigeModel": "sigma0.models.nanbeige",
            "OuroConfig": "sigma0.models.ouro_config",
            "OuroForCausalLM": "sigma0.models.ouro",
            "OuroModel": "sigma0.models.ouro",
            "RavenConfig": "sigma0.models.raven_config",
            "RavenForCausalLM": "sigma0.models.raven_causal",
            "RavenModel": "sigma0.models.raven",
        },
    )

FAMILIES: dict[str, dict[str, str]] = {
    "ouro": {"config": "OuroConfig", "base": "OuroModel", "causal": "OuroForCausalLM"},
    "nanbeige": {"config": "NanbeigeConfig", "base": "NanbeigeModel", "causal": "NanbeigeForCausalLM"},
    "huginn_raven": {"config": "RavenConfig", "base": "RavenModel", "causal": "RavenForCausalLM"},
}


def family_class(model_type: str, kind: Literal["config", "base", "causal"]) -> Any:
    """A class of a family, imported now: its config, its model, or its model with a head."""
    return getattr(sys.modules[__name__], FAMILIES[model_type][kind])


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
