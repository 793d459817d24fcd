"""Memory of a model by formula: nothing here is measured, and no tensor is made.

    weights     V D (twice unless tied) + L (2 D H d + 2 D H_kv d + 3 D I + N D) + D + G (D + 1) numbers
    a token     T L 2 H_kv d numbers of K/V: every layer keeps a plane for each loop
    a sequence  its tokens rounded up to whole blocks

V is the vocabulary, D the width, L the layers of the shared block, H and H_kv its query and K/V heads of d numbers
each, I the width of the MLP, T the loops; a layer has N norms, and G is 1 where there is a gate, else 0. Sources: the
modules of `sigma0.models.ouro` and `sigma0.models.nanbeige`, and `PagedPlanes`, whose blocks hold all T planes. So
`full`, `finish`, `verify` and `drop` take the same: under `drop` the planes that a token which exited at e < T does not
write are filled with copies of plane e, since deeper rows attend there.
"""

from dataclasses import dataclass
from typing import Any

# Norms of a layer and gates of the families, by `model_type`.
_FAMILIES = {"ouro": (4, 1), "nanbeige": (2, 0)}
# Tensors alive at once in a pass, counted in `OuroDecoderLayer`, its norms (in float32) and the head's statistics.
_STATES = 4
_NORM_FLOATS = 3
_MLP = 4
_QUERIES = 3
_KEYS = 5
_HEAD_FLOATS = 4
_FLOAT = 4
# Differences between loop states that a token in flight keeps, and the state itself, twice while the buffer grows.
_TRAJECTORY = 10


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that its memory depends on.

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
        norms: N.
        gates: G.
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
    norms: int = 4
    gates: int = 1

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """The shape in a configuration.

        Raises:
            ValueError: For a model without loops.
        """
        if config.model_type not in _FAMILIES:
            raise ValueError(f"a {config.model_type!r} model has no loops: these formulas are for looped ones")
        norms, gates = _FAMILIES[config.model_type]
        return cls(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            mlp_width=config.intermediate_size,
            layers=config.num_hidden_layers,
            loops=config.num_loops,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            positions=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
            norms=norms,
            gates=gates,
        )


@dataclass(frozen=True)
class Serving:
    """How a model is served, as `sigma0 serve` takes it.

    Attributes:
        number_bytes: Of a weight and of a number of K/V.
        page_size: Tokens of a block.
        running: Requests that run at most.
        pass_rows: Rows up to which prefill may fill a pass.
        spare: Share of the memory that is left free: the CUDA context, the allocator's gaps, the statistics of tokens.
    """

    number_bytes: int = 2
    page_size: int = 16
    running: int = 16
    pass_rows: int = 256
    spare: float = 0.1

    def __post_init__(self) -> None:
        for name in ("number_bytes", "page_size", "running", "pass_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.spare < 1:
            raise ValueError(f"spare must lie in [0, 1), got {self.spare}")


@dataclass(frozen=True)
class MemoryFit:
    """The sequences that fit into a memory.

    Attributes:
        memory: Bytes.
        context: Tokens of a whole sequence, prompt and answer together.
        weights: Bytes.
        a_pass: Upper estimate of the bytes of a pass besides weights and K/V.
        sequence: Bytes of K/V of a whole sequence.
        sequences: Whole sequences whose K/V fit at once.
        tokens: Tokens of K/V that fit over all sequences.
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
    layer = attention + 3 * width * shape.mlp_width + shape.norms * width
    ends = (1 if shape.tied else 2) * shape.vocabulary * width
    # the norm after every loop, and the gate with its bias
    return ends + shape.layers * layer + width + shape.gates * (width + 1)


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


def block_bytes(shape: ModelShape, number_bytes: int, page_size: int) -> int:
    """Bytes of K/V of one block."""
    return token_bytes(shape, number_bytes) * page_size


def blocks_for(tokens: int, page_size: int) -> int:
    """Blocks that so many tokens of one sequence take: the last one may be partly empty."""
    return -(-tokens // page_size)


def sequence_bytes(shape: ModelShape, number_bytes: int, page_size: int, tokens: int) -> int:
    """Bytes of K/V of one sequence."""
    return blocks_for(tokens, page_size) * block_bytes(shape, number_bytes, page_size)


def pass_bytes(shape: ModelShape, serving: Serving, context: int) -> int:
    """Upper estimate of the bytes of a pass besides weights and K/V.

    The states and the widest layer of all rows, their trajectories, the K/V that attention copies, its mask, and the
    logits with their statistics in float32.

    Args:
        shape: Of the model.
        serving: Number of rows.
        context: Tokens of each sequence.
    """
    rows = max(serving.pass_rows, serving.running * shape.loops)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widest = max(_MLP * shape.mlp_width, _QUERIES * queries + _KEYS * keys)
    states = rows * ((_STATES * shape.width + widest) * serving.number_bytes + _NORM_FLOATS * shape.width * _FLOAT)
    kept = serving.running * shape.loops * _TRAJECTORY * shape.width * serving.number_bytes
    # blocks are read in place, but for one sequence at a time whose blocks do not follow each other
    gathered = context * 2 * keys * serving.number_bytes
    mask = rows * context * (1 + serving.number_bytes)
    head = serving.running * shape.vocabulary * (serving.number_bytes + _HEAD_FLOATS * _FLOAT)
    return states + kept + gathered + mask + head


def fit(shape: ModelShape, serving: Serving, memory: int, context: int) -> MemoryFit:
    """The sequences that fit into a memory besides the weights and a pass.

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
    blocks = max(0, left) // block_bytes(shape, serving.number_bytes, serving.page_size)
    return MemoryFit(
        memory=memory,
        context=context,
        weights=weights,
        a_pass=a_pass,
        sequence=sequence_bytes(shape, serving.number_bytes, serving.page_size, context),
        sequences=blocks // blocks_for(context, serving.page_size),
        tokens=blocks * serving.page_size,
    )
