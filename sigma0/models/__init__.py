"""Looped families as Hugging Face classes; importing this registers them with transformers' auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sigma0.models.nanbeige import NanbeigeForCausalLM, NanbeigeModel
from sigma0.models.nanbeige_config import NanbeigeConfig
from sigma0.models.ouro import OuroForCausalLM, OuroModel
from sigma0.models.ouro_config import OuroConfig
from sigma0.models.raven import RavenModel
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.raven_config import RavenConfig

for _config, _model, _causal in (
    (OuroConfig, OuroModel, OuroForCausalLM),
    (NanbeigeConfig, NanbeigeModel, NanbeigeForCausalLM),
    (RavenConfig, RavenModel, RavenForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)

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
