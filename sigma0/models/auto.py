"""Importing this registers the looped families with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sigma0.models import FAMILIES, family_class

for _family in FAMILIES:
    _config = family_class(_family, "config")
    AutoConfig.register(_family, _config, exist_ok=True)
    AutoModel.register(_config, family_class(_family, "base"), exist_ok=True)
    AutoModelForCausalLM.register(_config, family_class(_family, "causal"), exist_ok=True)
