"""sigma0: looped language models with a depth of its own for each token, the skipped loops really skipped."""

from sigma0 import models as models
from sigma0.cache import DepthCache
from sigma0.canary import CollapseCanary
from sigma0.export import export
from sigma0.loading import load, shipped_models
from sigma0.outputs import DepthGenerateOutput, LoopedCausalLMOutput
from sigma0.settings import ExitConfig, FateConfig
from sigma0.text import Generation, generate, stream
from sigma0.tokens import Token
from sigma0.verdict import DoorPolicy, ReasonVerdict, door

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
