"""Looped families as Hugging Face classes; importing this registers them with transformers' auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sigma0.models.ouro import OuroForCausalLM, OuroModel
from sigma0.models.ouro_config import OuroConfig
from sigma0.models.raven import RavenModel
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.raven_config import RavenConfig

AutoConfig.register("ouro", OuroConfig, exist_ok=True)
AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
AutoConfig.register("huginn_raven", RavenConfig, exist_ok=True)
AutoModel.register(RavenConfig, RavenModel, exist_ok=True)
AutoModelForCausalLM.register(RavenConfig, RavenForCausalLM, exist_ok=True)

__all__ = ["OuroConfig", "OuroForCausalLM", "OuroModel", "RavenConfig", "RavenForCausalLM", "RavenModel"]
