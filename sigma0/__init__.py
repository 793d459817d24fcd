"""sigma0: looped language models with a depth of its own for each token, the skipped loops really skipped."""

from sigma0 import models as models
from sigma0.cache import DepthCache
from sigma0.settings import ExitConfig

__all__ = ["DepthCache", "ExitConfig"]
__version__ = "0.1.0"
