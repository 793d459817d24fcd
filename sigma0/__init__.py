"""sigma0: looped language models with a depth of its own for each token, the skipped loops really skipped."""

from sigma0 import models as models
from sigma0.cache import DepthCache
from sigma0.export import export
from sigma0.loading import load, shipped_models
from sigma0.outputs import DepthGenerateOutput, LoopedCausalLMOutput
from sigma0.settings import ExitConfig
from sigma0.text import Generation, Token, generate, stream

__all__ = [
    "DepthCache",
    "DepthGenerateOutput",
    "ExitConfig",
    "Generation",
    "LoopedCausalLMOutput",
    "Token",
    "export",
    "generate",
    "load",
    "shipped_models",
    "stream",
]
__version__ = "0.1.0"
