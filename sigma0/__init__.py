"""sigma0: looped language models with a depth of its own for each token, the skipped loops really skipped.

Importing it is cheap: torch and transformers are imported when a name that needs them is first used.
"""

from typing import TYPE_CHECKING

from sigma0.lazy import lazy_names
from sigma0.registration import register_when_loaded

if TYPE_CHECKING:
    from sigma0 import models as models
    from sigma0.api import generate, stream
    from sigma0.checkpoints import shipped_models
    from sigma0.config import ExitConfig, FateConfig
    from sigma0.decode.kv_cache import DepthCache
    from sigma0.models.export import export
    from sigma0.models.load import load
    from sigma0.models.outputs import DepthGenerateOutput, LoopedCausalLMOutput
    from sigma0.signals.canary import CollapseCanary
    from sigma0.signals.generation import Generation
    from sigma0.signals.tokens import Token
    from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, door
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "CollapseCanary": "sigma0.signals.canary",
            "DepthCache": "sigma0.decode.kv_cache",
            "DepthGenerateOutput": "sigma0.models.outputs",
            "DoorPolicy": "sigma0.signals.verdict",
            "ExitConfig": "sigma0.config",
            "FateConfig": "sigma0.config",
            "Generation": "sigma0.signals.generation",
            "LoopedCausalLMOutput": "sigma0.models.outputs",
            "ReasonVerdict": "sigma0.signals.verdict",
            "Token": "sigma0.signals.tokens",
            "door": "sigma0.signals.verdict",
            "export": "sigma0.models.export",
            "generate": "sigma0.api",
            "load": "sigma0.models.load",
            "shipped_models": "sigma0.checkpoints",
            "stream": "sigma0.api",
            # what `import sigma0` alone has always given access to
            "api": "sigma0.api",
            "config": "sigma0.config",
            "decode": "sigma0.api",
            "kernels": "sigma0.api",
            "models": "sigma0.models",
            "signals": "sigma0.api",
        },
    )

__all__ = [
    "CollapseCanary",
    "DepthCache",
    "DepthGenerateOutput",
    "DoorPolicy",
    "ExitConfig",
    "FateConfig",
    "Generation",
    "LoopedCausalLMOutput",
    "ReasonVerdict",
    "Token",
    "door",
    "export",
    "generate",
    "load",
    "shipped_models",
    "stream",
]
__version__ = "0.1.0"

register_when_loaded()
