"""Drafts for vLLM's speculative decoding: the first loops of the same weights, over the same K/V.

A token's first k loops read and write planes 1 to k, which full depth has filled for everything before. So a draft
needs no second model and no second cache: k loops at the next position, the head, and on from what it says. vLLM then
runs all loops over the drafts, which writes every plane of them anew, and its rejection sampler judges; what is emitted
is full depth's, token for token or in distribution.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigma0.serve.vllm.cpu_kernels import correct_rejection_sampler
from sigma0.serve.vllm.models import LoopedForCausalLM
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

SETTING = "draft_loops"


class LoopDraft:
    """vLLM's custom proposer, `"method": "custom_class", "model": "sigma0.serve.vllm.LoopDraft"`.

    Drafts are the argmax after `draft_loops` loops (`additional_config`). vLLM reserves no blocks for a custom class,
    so they end with the block that a sequence writes into.

    Attributes:
        loops: k, loops of a draft.
        passes: Passes of the block that drafts took so far: k for each position drafted, whatever the batch.

    Raises:
        ValueError: For no number of loops, or where whole steps are CUDA graphs, since then vLLM does not run Python in
            which a step's blocks could be seen.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        loops = vllm_config.additional_config.get(SETTING)
        if not isinstance(loops, int) or loops < 1:
            raise ValueError(f"additional_config[{SETTING!r}] must be a whole number of at least 1, got {loops!r}")
        mode = vllm_config.compilation_config.cudagraph_mode
        if mode is not None and mode.has_full_cudagraphs():
            raise ValueError(f"cudagraph_mode={mode.name} leaves no room for drafts, use PIECEWISE or NONE")
        self.loops = loops
        self.passes = 0
        self._config = vllm_config
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._step: Any = None
        correct_rejection_sampler()

    def load_model(self, model: LoopedForCausalLM) -> None:
        """Takes the model that is served.

        Raises:
            ValueError: If it has no more loops than a draft, or is no looped model.
        """
        if not isinstance(model, LoopedForCausalLM):
            raise ValueError(f"LoopDraft drafts with looped models, got {type(model).__name__}")
        if self.loops >= model.model.loops:
            raise ValueError(f"{SETTING}={self.loops} must be below the {model.model.loops} loops of the model")
        self._model = model
        # (loop, layer) by loop: the planes that drafts read and write
        layers: Any = model.model.layers
        attentions = [layer.self_attn.planes[loop] for loop in range(self.loops) for layer in layers]
        self._names = [attention.layer_name for attention in attentions]
        self._first = attentions[0]
        self._builder: Any = None
        model.register_forward_pre_hook(self._see_step)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for each sequence of the batch; called by vLLM when it has sampled.

        Args:
            sampled_token_ids: What each was given in this step; none while it is in prefill.
            num_tokens_no_spec: Tokens of each, those included, `[R]`.
            token_ids_cpu: Their ids, `[R, longest]`.
            slot_mappings: Where the step wrote its K/V; not used.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        size = self._config.cache_config.block_size
        last = num_tokens_no_spec[: len(drafts)].astype(np.int64) - 1  # [R] position of the newest token, not yet run
        blocks = -(-self._step.seq_lens[: len(drafts)].cpu().numpy() // size)  # [R] blocks that hold the step
        wanted = np.minimum(self._most, blocks * size - last)  # [R]
        wanted[[not sampled for sampled in sampled_token_ids]] = 0
        tokens = token_ids_cpu[np.arange(len(drafts)), last]  # [R]
        for step in range(max(wanted, default=0)):
            rows = np.flatnonzero(wanted > step)
            tokens[rows] = self._draft(rows, tokens[rows], last[rows] + step)
            for row in rows:
                drafts[row].append(int(tokens[row]))
        return drafts

    def _draft(self, rows: NDArray[Any], tokens: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
        """Ids `[A]` that follow `tokens` at `positions`, each `[A]`, of the sequences `rows` of the batch."""
        device = self._step.block_table.device
        ids, places = (torch.as_tensor(array, dtype=torch.long, device=device) for array in (tokens, positions))
        table = self._step.block_table[torch.as_tensor(rows, device=device)]  # [A, blocks]
        metadata, slots = self._metadata(table, places, int(positions.max()) + 1)
        with set_forward_context(
            dict.fromkeys(self._names, metadata),
            self._config,
            num_tokens=len(rows),
            slot_mapping=dict.fromkeys(self._names, slots),
        ):
            model = self._model.model
            hidden = model.run_loops(places, model.embed_tokens(ids), self.loops)  # [A, D]
        self.passes += self.loops
        logits = self._model.compute_logits(hidden)
        assert logits is not None, "every rank gathers logits"
        following: NDArray[Any] = logits.argmax(-1).cpu().numpy()
        return following

    def _metadata(self, table: Tensor, positions: Tensor, longest: int) -> tuple[Any, Tensor]:
        """What attention is told of one row for each of `[A]` sequences, and the rows' slots `[A]`."""
        size = self._config.cache_config.block_size
        blocks = table.gather(1, (positions // size)[:, None]).squeeze(1)  # [A]
        slots = blocks.long() * size + positions % size
        starts = torch.arange(len(table) + 1, dtype=torch.int32)
        lengths = (positions + 1).int()
        if self._builder is None:
            builder = self._first.get_attn_backend().get_builder_cls()
            spec = self._first.get_kv_cache_spec(self._config)
            self._builder = builder(spec, self._names, self._config, table.device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(table.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(table),
            num_actual_tokens=len(table),
            max_query_len=1,
            max_seq_len=longest,
            block_table_tensor=table,
            slot_mapping=slots,
            seq_lens_cpu_upper_bound=lengths.cpu(),
            positions=positions,
        )
        return self._builder.build(common_prefix_len=0, common_attn_metadata=common), slots

    def _see_step(self, module: Any, arguments: Any) -> None:
        """Keeps what attention is told of the step that is about to run: blocks and lengths of its sequences."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            self._step = metadata[self._first.layer_name]
