"""Looped families as Hugging Face classes, each imported when it is first used."""

from typing import TYPE_CHECKING

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

# Config, base model and model with a head of each `model_type`.
FAMILIES = {
    "ouro": ("OuroConfig", "OuroModel", "OuroForCausalLM"),
    "nanbeige": ("NanbeigeConfig", "NanbeigeModel", "NanbeigeForCausalLM"),
    "huginn_raven": ("RavenConfig", "RavenModel", "RavenForCausalLM"),
}

__all__ = [
    "NanbeigeConfig",
    "NanbeigeForCausalLM",
    "NanbeigeModel",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "RavenConfig",
    "RavenForCausalLM",
    "RavenModel",
]
