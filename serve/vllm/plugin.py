"""What vLLM calls in each of its processes before it looks a model up: the entry point `vllm.general_plugins`."""

# vLLM imports these by name when a checkpoint asks for them, in the process that runs it.
MODELS = {
    "OuroForCausalLM": "sigma0.serve.vllm.models:OuroForCausalLM",
    "NanbeigeForCausalLM": "sigma0.serve.vllm.models:NanbeigeForCausalLM",
}


def register() -> None:
    """Makes the looped families known: configs to transformers, models to vLLM, which imports them when needed.

    Called any number of times. No model code is imported and no device touched, so that vLLM may fork afterwards.
    """
    import sigma0.models  # noqa: F401  registers the configs
    from vllm import ModelRegistry

    for architecture, path in MODELS.items():
        ModelRegistry.register_model(architecture, path)
