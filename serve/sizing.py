"""What a model takes in memory, by formula: nothing here is measured, and no tensor is made.

    weights     V D (twice unless tied) + L (2 D H d + 2 D H_kv d + 3 D I + 4 D) + 2 D + 1 numbers
    a token     T L 2 H_kv d numbers of K/V: every layer keeps a plane for each loop
    a sequence  its tokens rounded up to whole pages

V is the vocabulary, D the width, L the layers of the shared block, H and H_kv its query and K/V heads of d numbers
each, I the width of the MLP, T the loops. Sources: the modules of `sigma0.models.ouro`, and `PagedPlanes`, whose pages
hold all T planes. So `full`, `finish`, `verify` and `drop` take the same: what a token that stopped at e < T would not
need under `drop` is filled with copies of plane e, where deeper readers look for it.
"""

from dataclasses import dataclass
from typing import Any

# What is alive at once in a pass, read off `OuroDecoderLayer`, its norms (in float32) and the head's statistics.
_STATES = 4
_NORM_FLOATS = 3
_MLP = 4
_QUERIES = 3
_KEYS = 5
_HEAD_FLOATS = 4
_FLOAT = 4
# Differences between loop states that a token in flight keeps, and the state itself, twice while the room grows.
_TRAJECTORY = 10


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on.

    Attributes:
        vocabulary: V.
        width: D.
        mlp_width: I.
        layers: L, of the shared block.
        loops: T.
        heads: H.
        kv_heads: H_kv.
        head_dim: d.
        positions: Of the longest text.
        tied: Whether embedding and head are one matrix.
    """

    vocabulary: int
    width: int
    mlp_width: int
    layers: int
    loops: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    tied: bool = False

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Of a configuration.

        Raises:
            ValueError: For a model without loops.
        """
        if getattr(config, "total_ut_steps", None) is None:
            raise ValueError(f"a {config.model_type!r} model has no loops: these formulas are for looped ones")
        return cls(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            mlp_width=config.intermediate_size,
            layers=config.num_hidden_layers,
            loops=config.total_ut_steps,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            positions=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
        )


@dataclass(frozen=True)
class Serving:
    """How a model is served, as `sigma0 serve` takes it.

    Attributes:
        number_bytes: Of a weight and of a number of K/V.
        page_size: Tokens of a page.
        running: Requests that share passes at most.
        pass_rows: Rows that prompts may bring a pass up to.
        gathers: Whether rows that decode take copies of the K/V that they see: plain torch does, the Triton kernel
            reads them where they lie.
        spare: Share of the memory that is left alone: the CUDA context, the allocator's gaps, the statistics of tokens.
    """

    number_bytes: int = 2
    page_size: int = 16
    running: int = 16
    pass_rows: int = 256
    gathers: bool = False
    spare: float = 0.1

    def __post_init__(self) -> None:
        for name in ("number_bytes", "page_size", "running", "pass_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.spare < 1:
            raise ValueError(f"spare must lie in [0, 1), got {self.spare}")


@dataclass(frozen=True)
class MemoryFit:
    """What fits into a memory.

    Attributes:
        memory: Bytes of it.
        context: Tokens of a whole sequence, prompt and answer together.
        weights: Bytes.
        a_pass: Bytes that a pass takes beside weights and K/V, an estimate from above.
        sequence: Bytes of K/V of a whole sequence.
        sequences: Whole sequences whose K/V fit at once.
        tokens: Of K/V that fit in all, whoever they belong to.
    """

    memory: int
    context: int
    weights: int
    a_pass: int
    sequence: int
    sequences: int
    tokens: int


def parameters(shape: ModelShape) -> int:
    """Numbers in all weights."""
    width, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * width * queries + 2 * width * keys
    layer = attention + 3 * width * shape.mlp_width + 4 * width
    ends = (1 if shape.tied else 2) * shape.vocabulary * width
    # the norm behind every loop, and the gate with its bias
    return ends + shape.layers * layer + 2 * width + 1


def weight_bytes(shape: ModelShape, number_bytes: int) -> int:
    """Bytes of all weights."""
    return parameters(shape) * number_bytes


def token_bytes(shape: ModelShape, number_bytes: int, planes: int | None = None) -> int:
    """Bytes of K/V of one token.

    Args:
        shape: Of the model.
        number_bytes: Of a number.
        planes: That are kept; T if None. A `DepthCache` under `fixed` keeps k of them, the server always T.
    """
    kept = shape.loops if planes is None else planes
    return kept * shape.layers * 2 * shape.kv_heads * shape.head_dim * number_bytes


def page_bytes(shape: ModelShape, number_bytes: int, page_size: int) -> int:
    """Bytes of K/V of one page."""
    return token_bytes(shape, number_bytes) * page_size


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that so many tokens of one sequence take: the last one may be partly empty."""
    return -(-tokens // page_size)


def sequence_bytes(shape: ModelShape, number_bytes: int, page_size: int, tokens: int) -> int:
    """Bytes of K/V of one sequence."""
    return pages_for(tokens, page_size) * page_bytes(shape, number_bytes, page_size)


def pass_bytes(shape: ModelShape, serving: Serving, context: int) -> int:
    """Bytes that a pass takes beside weights and K/V: an estimate from above.

    The states and the widest layer of all rows, their trajectories, the K/V that attention copies, its mask, and the
    logits with their statistics in float32.

    Args:
        shape: Of the model.
        serving: How many rows, and what attends.
        context: Tokens of each sequence.
    """
    rows = max(serving.pass_rows, serving.running * shape.loops)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widest = max(_MLP * shape.mlp_width, _QUERIES * queries + _KEYS * keys)
    states = rows * ((_STATES * shape.width + widest) * serving.number_bytes + _NORM_FLOATS * shape.width * _FLOAT)
    kept = serving.running * shape.loops * _TRAJECTORY * shape.width * serving.number_bytes
    # a stretch of a prompt takes a copy of its text's plane; without the kernel every row that decodes one of its own
    copies = serving.running * shape.loops if serving.gathers else 1
    gathered = copies * context * 2 * keys * serving.number_bytes
    mask = rows * context * (1 + serving.number_bytes)
    head = serving.running * shape.vocabulary * (serving.number_bytes + _HEAD_FLOATS * _FLOAT)
    return states + kept + gathered + mask + head


def fit(shape: ModelShape, serving: Serving, memory: int, context: int) -> MemoryFit:
    """What fits into a memory beside the weights and a pass.

    Args:
        shape: Of the model.
        serving: How it is served.
        memory: Bytes.
        context: Tokens of a whole sequence.

    Raises:
        ValueError: For a memory of nothing, or a context that the model does not have.
    """
    if memory < 1:
        raise ValueError(f"a memory of {memory} bytes holds nothing")
    if not 1 <= context <= shape.positions:
        raise ValueError(f"a context of {context} tokens is not one of the model's 1 to {shape.positions} (--context)")
    weights = weight_bytes(shape, serving.number_bytes)
    a_pass = pass_bytes(shape, serving, context)
    left = int(memory * (1 - serving.spare)) - weights - a_pass
    pages = max(0, left) // page_bytes(shape, serving.number_bytes, serving.page_size)
    return MemoryFit(
        memory=memory,
        context=context,
        weights=weights,
        a_pass=a_pass,
        sequence=sequence_bytes(shape, serving.number_bytes, serving.page_size, context),
        sequences=pages // pages_for(context, serving.page_size),
        tokens=pages * serving.page_size,
    )
