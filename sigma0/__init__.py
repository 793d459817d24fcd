"""sigma0: looped language models with a depth of its own for each token, the skipped loops really skipped."""

from sigma0 import models as models
from sigma0.api import Generation, generate, stream
from sigma0.config import ExitConfig, FateConfig
from sigma0.decode.kv_cache import DepthCache
from sigma0.models.export import export
from sigma0.models.load import load, shipped_models
from sigma0.models.outputs import DepthGenerateOutput, LoopedCausalLMOutput
from sigma0.signals.canary import CollapseCanary
from sigma0.signals.tokens import Token
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, door

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
