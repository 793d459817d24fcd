"""Looped models inside of vLLM: a plugin that vLLM finds by itself, and drafts for its speculative decoding."""

from sigma0.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"LoopDraft": "sigma0.serve.vllm.draft"})
