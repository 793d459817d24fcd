"""Stock Hugging Face decoding of the same weights at full depth, to be compared with; and published code.

What the published Ouro code does (arXiv 2510.25741): every loop of every layer is a layer of an ordinary cache, here
transformers' `DynamicCache`, and transformers' own `generate` calls a plain forward for each token. The layers are the
very modules of the looped model, so the weights and the arithmetic of a layer are the same.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.generation import CompileConfig, GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from sigma0.bench.speed import published_process
from sigma0.bench.speed.decoders import Decoded, Decoder
from sigma0.models import OuroConfig, OuroForCausalLM
from sigma0.models.cache_name import given_cache, named_cache


class StockLoopedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A looped model as transformers' users write one, of the modules of ours."""

    config_class = OuroConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _can_compile_fullgraph = True

    def __init__(self, looped: OuroForCausalLM) -> None:
        if not isinstance(looped, OuroForCausalLM):
            raise ValueError(
                f"the way huggingface is written for Ouro, not for {looped.config.model_type} models: leave it out of "
                "--ways"
            )
        # a cache needs a layer for each layer and loop
        config = deepcopy(looped.config)
        config.num_hidden_layers *= config.total_ut_steps
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        super().__init__(config)
        self.inner = looped.model
        self.lm_head = looped.lm_head
        self.generation_config.eos_token_id = None
        self.generation_config.pad_token_id = 0

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Every loop for every position of `input_ids` `[B, S]`; logits of the last `logits_to_keep` positions."""
        hidden_states = self.inner.embed_tokens(input_ids)  # [B, S, D]
        cache = given_cache(past_key_values, cache)
        if cache is None:
            cache = DynamicCache()
        # `generate` makes the masks of a static cache itself, by the type of a layer
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask["full_attention"]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            **named_cache(cache),
            position_ids=position_ids,
        )
        position_embeddings = self.inner.rotary_emb(hidden_states, position_ids)
        hidden_states = self.loops(range(self.config.total_ut_steps), hidden_states, position_embeddings, mask, cache)
        logits = self.lm_head(hidden_states[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, **named_cache(cache))

    def loops(self, loops: range, hidden_states: Tensor, position_embeddings: Any, mask: Any, cache: Any) -> Tensor:
        """States `[B, S, D]` after some loops."""
        for loop in loops:
            for index, layer in enumerate(self.inner.layers):
                hidden_states = layer(
                    hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=mask,
                    past_key_values=cache,
                    plane=loop * len(self.inner.layers) + index,
                )
            hidden_states = self.inner.norm(hidden_states)
        return hidden_states


class Stock(Decoder):
    """transformers' own decoding at full depth; with a static cache under `torch.compile`, as its documentation says.

    `generate(cache_implementation="static")` reads the prompt with the plain forward and calls the compiled one for
    every token after the first. On accelerators it compiles by itself; elsewhere only where the compile settings say
    so. The first run compiles. Without a `backend` of `torch.compile` the cache grows.

    Where another model of transformers is given as `stock`, it decodes in place of these weights.
    """

    def __init__(self, model: Any, ids: Tensor, new_tokens: int, backend: str | None = None, stock: Any = None) -> None:
        super().__init__(model, ids, new_tokens)
        self._stock, self._backend = StockLoopedModel(model) if stock is None else stock, backend
        self._cache: Any = None

    def read(self) -> None:
        """Reads the prompt but for its last token, from nothing."""
        room = {"config": self._stock.config, "max_cache_len": self.ids.shape[1] + self.new_tokens}
        self._cache = DynamicCache() if self._backend is None else StaticCache(**room)
        ids = self.ids[:, :-1]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self._stock(ids, position_ids=positions, **named_cache(self._cache), logits_to_keep=1)

    def decode(self) -> Decoded:
        """New tokens, timed from the first on; a static cache reads the prompt anew."""
        if self._backend is None:
            if not self.is_read:
                self.prompt()
            self._cache.crop(-(self._cache.get_seq_length() - (self.ids.shape[1] - 1)))
            settings = named_cache(self._cache)
        else:
            # other modes than the default are transformers' own choice
            compiled = CompileConfig(fullgraph=True, dynamic=False, backend=self._backend)
            compiled._compile_all_devices = True
            settings = {"cache_implementation": "static", "compile_config": compiled}
        watch = published_process.Stopwatch()
        sequences = self._stock.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([watch]),
            **settings,
        )
        seconds, tokens = watch.marks[-1] - watch.marks[0], sequences[:, self.ids.shape[1] :]
        return self.whole_depth(seconds, tokens, *(() if self._backend is None else (1, "compile")))


class Published(Decoder):
    """Published code at full depth, as its own `generate` calls it; the process waits between requests.

    Attributes:
        versions: Of the libraries of that Python.
    """

    def __init__(self, process: "subprocess.Popen[str]", model: Any, ids: Tensor, new_tokens: int) -> None:
        super().__init__(model, ids, new_tokens)
        self._process = process
        result = self._answer()
        self.versions = {f"published code on {name}": result[name] for name in sorted(result)}

    def prompt(self) -> float:
        """Reads the prompts, up to a token of each; seconds."""
        return float(self._ask(1)["prompt_seconds"])

    def decode(self) -> Decoded:
        """Reads the prompts anew and continues them; timed from the first new token on."""
        answer = self._ask(self.new_tokens)
        return self.whole_depth(answer["seconds"], torch.tensor(answer["tokens"]))

    def _ask(self, new_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"ids": self.ids.tolist(), "new_tokens": new_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(
                f"the published code ended with exit code {self._process.wait()}; above is what it wrote: "
                "--published-python must have the transformers that the code was written for"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def published(model: Any, ids: Tensor, new_tokens: int, python: str, code: Path) -> Iterator[Published]:
    """Published code that holds a model's weights, in a process of that `python` that ends with this context.

    The folder `code` has the code, which is run, and a `config.json` whose `auto_map` names its classes.

    Raises:
        ValueError: If the weights are quantised, the folder has no such file, or the code does not run.
    """
    if getattr(model, "quantization", None) is not None:
        raise ValueError(f"published code takes weights of floats: leave --quantization {model.quantization} out")
    try:
        auto_map = json.loads((code / "config.json").read_text())["auto_map"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(code)!r} has no config.json with an auto_map, so it holds no published code") from error
    with TemporaryDirectory() as folder:
        _write(model, Path(folder), code, auto_map)
        options = [folder, str(model.dtype).removeprefix("torch."), str(model.device), str(torch.get_num_threads())]
        # where transformers copies code before it imports it
        place = {**os.environ, "HF_MODULES_CACHE": f"{folder}/modules"}
        with subprocess.Popen(
            [python, published_process.__file__, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=place,
        ) as process:
            try:
                yield Published(process, model, ids, new_tokens)
            finally:
                process.kill()


def _write(model: Any, folder: Path, code: Path, auto_map: dict[str, str]) -> None:
    """A checkpoint with a model's weights whose code is the published one's."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # has settings of ours
    for path in code.glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    # names of transformers 4
    config |= {"auto_map": auto_map, "rope_theta": config["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
