"""Decodes with a model's published code in a Python of its own: a request a line in, an answer a line out.

Imports nothing of sigma0, since published code may need an older transformers than sigma0 does.
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria


class Stopwatch(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of every token; stops nothing."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """See `StoppingCriteria`."""
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.marks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def main() -> None:
    """Answers requests until the input ends; arguments: folder, dtype, device, threads."""
    folder, dtype, device, threads = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever published code prints is no answer
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, torch_dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    answer: dict[str, Any] = {name: version(name) for name in ("torch", "transformers")}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        ids = torch.tensor(request["ids"], device=device)
        watch, start = Stopwatch(), time.perf_counter()
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["new_tokens"],
            do_sample=False,
            stopping_criteria=[watch],
        )
        answer = {
            "prompt_seconds": watch.marks[0] - start,
            "seconds": watch.marks[-1] - watch.marks[0],
            "tokens": written[:, ids.shape[1] :].tolist(),
        }


if __name__ == "__main__":
    main()
