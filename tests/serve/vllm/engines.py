"""vLLM's engine in this process, and what a test needs to run it."""

import importlib.util
import os
from contextlib import contextmanager

import pytest
import torch

from sigma0.models import OuroForCausalLM

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextmanager
def engine(folder, drafts=0, loops=1, **settings):
    """An `LLM` of a checkpoint that takes and gives ids; with `drafts`, so many of them after so many loops."""
    os.environ.update(SETTINGS)
    from vllm import LLM

    if drafts:
        method = {"method": "custom_class", "model": "sigma0.serve.vllm.LoopDraft", "num_speculative_tokens": drafts}
        settings |= {"speculative_config": method, "additional_config": {"draft_loops": loops}}
    fixed = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    llm = LLM(str(folder), **{"disable_log_stats": False, **fixed, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def write(llm, prompts, **sampling):
    """The ids that the engine writes after prompts of ids, all asked for at once."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, "detokenize": False, **sampling})
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def full_depth(model: OuroForCausalLM, prompts, max_new_tokens=24, exit_config=None):
    """What sigma0 writes after each prompt, at full depth where nothing else is said."""
    asked = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    asked["exit_config"] = exit_config or {"mode": "full"}
    return [model.generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist() for prompt in prompts]


def counter(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def random_prompts(vocabulary, count=16, seed=0):
    """Prompts of 3 to 18 ids; every other one begins like the first, for the prefix cache."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(3, vocabulary, (64,), generator=generator).tolist()
    prompts = []
    for number in range(count):
        current = torch.randint(3, vocabulary, (3 + number,), generator=generator).tolist()
        prompts.append(first + current if number % 2 else current)
    return prompts
