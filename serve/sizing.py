"""Memory of a model by formula: nothing here is measured, and no tensor is made.

    weights     V D (twice unless tied) + L (2 D H d + 2 D H_kv d + 3 D I + N D) + D + G (D + 1) numbers
    a token     T L 2 H_kv d numbers of K/V: every layer keeps a plane for each loop
    Raven       (P + L + C) layers of V D + ... as above but for their norms, and 2 D^2 + D numbers of adapter and norm;
                a token (T L + P + 2 C) 2 H_kv d: a prelude's layers have one plane, a coda's two
    a sequence  its tokens rounded up to whole blocks
    few bits    of T planes of b_t bits and groups of g numbers, a token takes L 2 H_kv sum_t (d b_t / 8 + 2 d / g)
                bytes (and P + 2 C planes in b_T bits), and each sequence a segment of tokens as computed beside its
                blocks (`decode.planes`)

V is the vocabulary, D the width, L the layers of the shared block, H and H_kv its query and K/V heads of d numbers
each, I the width of the MLP, T the loops; a layer has N norms, and G is 1 where there is a gate, else 0; P and C are
the layers of prelude and coda. Sources: the modules of `sigma0.models.ouro`, `nanbeige` and `raven`, and `PagedPlanes`,
whose blocks hold all planes. So `full`, `finish`, `verify` and `drop` take the same: under `drop` the planes that a
token which exited at e < T does not write are filled with copies of plane e, since deeper rows attend there.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sigma0.config import KVConfig

# Norms of a layer and gates of families that loop over all layers and are not Llama's (2, 0), by `model_type`.
_NORMS_AND_GATES = {"ouro": (4, 1)}
# Tensors alive at once in a pass, counted in `OuroDecoderLayer`, its norms (in float32) and the head's statistics.
_STATES = 4
_NORM_FLOATS = 3
_MLP = 4
_QUERIES = 3
_KEYS = 5
_HEAD_FLOATS = 4
_DEEPEST_FLOATS = 3
_FLOAT = 4
# Differences between loop states that a token in flight keeps, and the state itself, twice while the buffer grows.
_TRAJECTORY = 10
# Copies of what a row carries beside its state.
_CARRIED = 6


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that its memory depends on."""

    vocabulary: int  # V
    width: int  # D
    mlp_width: int  # I
    layers: int  # L, of the shared block
    loops: int  # T, in passes
    heads: int  # H
    kv_heads: int  # H_kv
    head_dim: int  # d
    positions: int  # Of the longest text
    layer_numbers: int  # Of a layer's weights that are no matrices
    end_numbers: int  # Of all weights outside of layers, embedding and head
    tied: bool = False  # Whether embedding and head are one matrix
    prelude: int = 0  # Layers that run once, before the loops
    coda: int = 0  # Layers that run where a token is read
    stride: int = 1  # Loops that a pass runs
    carried: int = 0  # Numbers of a row in flight beside its state

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """The shape in a configuration.

        Raises:
            ValueError: For a model without loops.
        """
        if config.model_type == "huginn_raven":
            return cls._of_raven(config)
        # as late as possible: the help of a command imports no family
        from sigma0.models import FAMILIES

        if config.model_type not in FAMILIES:
            raise ValueError(f"a {config.model_type!r} model has no loops: these formulas are for looped ones")
        norms, gates = _NORMS_AND_GATES.get(config.model_type, (2, 0))
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
            layer_numbers=norms * config.hidden_size,
            # the norm after every loop, and the gate with its bias
            end_numbers=config.hidden_size + gates * (config.hidden_size + 1),
            tied=config.tie_word_embeddings,
        )

    @classmethod
    def _of_raven(cls, config: Any) -> "ModelShape":
        assert config.padded_vocab_size and config.num_key_value_heads and config.head_dim
        width, queries = config.n_embd, config.n_heads * config.head_dim
        current = 4 * width if config.layout == "sandwich" else 2 * width
        if config.layout == "post":
            current += queries + config.num_key_value_heads * config.head_dim
        if config.qk_bias:
            current += 2 * queries
        return cls(
            vocabulary=config.padded_vocab_size,
            width=width,
            mlp_width=config.intermediate_size,
            layers=config.n_layers_in_recurrent_block,
            loops=config.loops // config.stride,
            heads=config.n_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            positions=config.max_position_embeddings or config.block_size,
            tied=config.tie_word_embeddings,
            prelude=config.n_layers_in_prelude,
            coda=config.n_layers_in_coda,
            stride=config.stride,
            carried=width,
            layer_numbers=current,
            # adapter and norm
            end_numbers=2 * width * width + width,
        )


@dataclass(frozen=True)
class Serving:
    """How a model is served, as `sigma0 serve` takes it."""

    number_bytes: int = 2  # Of a weight and of a number of K/V
    page_size: int = 16  # Tokens of a block
    running: int = 16  # Requests that run at most
    pass_rows: int = 256  # Rows up to which prefill may fill a pass
    # Share of the memory that is left free: the CUDA context, the allocator's gaps, the statistics of tokens
    spare: float = 0.1
    kv: "KVConfig | None" = None  # How K/V are stored; None: as the model computes them

    def __post_init__(self) -> None:
        for name in ("number_bytes", "page_size", "running", "pass_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.spare < 1:
            raise ValueError(f"spare must lie in [0, 1), got {self.spare}")


@dataclass(frozen=True)
class MemoryFit:
    """The sequences that fit into a memory."""

    memory: int  # Bytes
    context: int  # Tokens of a whole sequence, prompt and answer together
    weights: int  # Bytes
    a_pass: int  # Upper estimate of the bytes of a pass besides weights and K/V
    sequence: int  # Bytes of K/V of a whole sequence, in blocks
    under_way: int  # Bytes of the segments under way of all sequences that may run; 0 where K/V are as computed
    sequences: int  # Whole sequences whose K/V fit at once
    tokens: int  # Tokens of K/V that fit over all sequences


def parameters(shape: ModelShape) -> int:
    """Numbers in all weights."""
    width, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * width * queries + 2 * width * keys
    ends = (1 if shape.tied else 2) * shape.vocabulary * width
    layer = attention + 3 * width * shape.mlp_width + shape.layer_numbers
    return ends + (shape.layers + shape.prelude + shape.coda) * layer + shape.end_numbers


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
    from sigma0.config import CODA_PLANES

    kept = shape.loops if planes is None else planes
    count = kept * shape.stride * shape.layers + shape.prelude + CODA_PLANES * shape.coda
    return count * 2 * shape.kv_heads * shape.head_dim * number_bytes


def stored_bytes(shape: ModelShape, serving: Serving) -> int:
    """Bytes of K/V of one token in a block, as they are stored.

    Raises:
        ValueError: For a codec that does not fit the model.
    """
    if serving.kv is None or not serving.kv.is_coded:
        return token_bytes(shape, serving.number_bytes)
    # not before it is needed: torch takes seconds to import
    from sigma0.decode.planes import kv_quantizers

    stages = shape.prelude, shape.coda
    codecs = kv_quantizers(serving.kv, shape.stride * shape.layers, shape.loops, stages)
    codecs[0].check_width(shape.head_dim)
    return 2 * shape.kv_heads * sum(codec.head_bytes(shape.head_dim) for codec in codecs)


def block_bytes(shape: ModelShape, serving: Serving) -> int:
    """Bytes of K/V of one block."""
    return stored_bytes(shape, serving) * serving.page_size


def sequence_bytes(shape: ModelShape, serving: Serving, tokens: int) -> int:
    """Bytes of K/V of one sequence, in blocks."""
    return blocks_for(tokens, serving.page_size) * block_bytes(shape, serving)


def blocks_for(tokens: int, page_size: int) -> int:
    """Blocks that so many tokens of one sequence take: the last one may be partly empty."""
    return -(-tokens // page_size)


def pass_bytes(shape: ModelShape, serving: Serving, context: int) -> int:
    """Upper estimate of the bytes of a pass besides weights and K/V.

    The states and the widest layer of all rows, their trajectories, the K/V that attention copies, its mask, and the
    logits with their statistics in float32.

    Args:
        shape: Of the model.
        serving: Number of rows.
        context: Tokens of each sequence.
    """
    from sigma0.config import DEEPEST_ROWS

    rows = max(serving.pass_rows, serving.running * shape.loops)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widest = max(_MLP * shape.mlp_width, _QUERIES * queries + _KEYS * keys)
    states = rows * ((_STATES * shape.width + widest) * serving.number_bytes + _NORM_FLOATS * shape.width * _FLOAT)
    states += rows * _CARRIED * shape.carried * serving.number_bytes
    kept = serving.running * shape.loops * (_TRAJECTORY * shape.width + 2 * shape.carried) * serving.number_bytes
    # blocks are read in place, but for one sequence at a time whose blocks do not follow each other
    gathered = context * 2 * keys * serving.number_bytes
    mask = rows * context * (1 + serving.number_bytes)
    # where there is no coda, tokens that run no further are read together at their deepest loops
    deepest = 0 if shape.coda else DEEPEST_ROWS * (serving.number_bytes + _DEEPEST_FLOATS * _FLOAT)
    head = shape.vocabulary * max(serving.running * (serving.number_bytes + _HEAD_FLOATS * _FLOAT), deepest)
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
    segment = serving.kv.segment if serving.kv is not None and serving.kv.is_coded else 0
    under_way = serving.running * segment * token_bytes(shape, serving.number_bytes)
    left = int(memory * (1 - serving.spare)) - weights - a_pass - under_way
    blocks = max(0, left) // block_bytes(shape, serving)
    return MemoryFit(
        memory=memory,
        context=context,
        weights=weights,
        a_pass=a_pass,
        sequence=sequence_bytes(shape, serving, context),
        under_way=under_way,
        sequences=blocks // blocks_for(context, serving.page_size),
        tokens=blocks * serving.page_size,
    )
