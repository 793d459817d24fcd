"""Importing this registers the looped families with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sigma0 import models

for _config, _model, _causal in models.FAMILIES.values():
    _config_class = getattr(models, _config)
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, getattr(models, _model), exist_ok=True)
    AutoModelForCausalLM.register(_config_class, getattr(models, _causal), exist_ok=True)
