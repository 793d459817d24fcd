# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Copies the K/V of positions from one plane to others.

    copy_plane         planes[target, p] = planes[source, p]             for each position p of a layer
    copy_past_exits    planes[t, p] = planes[e_p, p],  e_p < t < T       for each position p of every layer

Bytes for each position and layer, with H_kv heads of d numbers of b bytes: 4 H_kv d b, keys and values read and
written; past an exit 2 (1 + T - 1 - e_p) H_kv d b.
"""

from torch import Tensor

from sigma0.kernels.operators import row_op
from sigma0.kernels.row_product import launch_options
from sigma0.presence import wants_triton

# Numbers of a position that a program copies at once.
_BLOCK = 1024


def _nothing(keys: Tensor, values: Tensor, positions: Tensor, source: int, target: int) -> None:
    return None


@row_op(_nothing, writes=("keys", "values"))
def copy_plane(keys: Tensor, values: Tensor, positions: Tensor, source: int, target: int) -> None:
    """The formula above, in place.

    One operation where it is traced: a compiled program then sees nothing of the sizes of the planes, which grow.

    Args:
        keys: Keys of one layer, `[planes, positions, H_kv, d]`; written.
        values: As `keys`.
        positions: Which, int64 `[N]`.
        source: Plane that is read.
        target: Plane that is written.
    """
    for planes in (keys, values):
        planes[target].index_copy_(0, positions, planes[source].index_select(0, positions))


def copy_past_exits(addresses: Tensor, like: Tensor, positions: Tensor, exits: Tensor) -> None:
    """The second formula in one launch of a Triton kernel for all layers, in place.

    Args:
        addresses: Where keys and values of each layer lie, int64 `[L, 2]`: all are as
        like: keys or values of one of them, `[planes, positions, H_kv, d]`, contiguous.
        positions: p, all different where e_p is not the last plane, int64 `[N]`.
        exits: e_p, int64 `[N]`.
    """
    planes, total, heads, width = like.shape
    if len(positions):
        _copy_past_exits_kernel[(len(positions), addresses.numel(), triton.cdiv(heads * width, _BLOCK))](
            addresses,
            like,
            positions.contiguous(),
            exits.contiguous(),
            planes,
            total,
            heads * width,
            BLOCK=_BLOCK,
            **launch_options(like.device),
        )


if wants_triton():
    import triton
    import triton.language as tl

    @triton.jit
    def _copy_past_exits_kernel(
        addresses_ptr,
        like_ptr,
        positions_ptr,
        exits_ptr,
        planes,
        total,
        width,
        BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0)
        position = tl.load(positions_ptr + row)
        left = tl.load(exits_ptr + row)
        kept = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(like_ptr.dtype.element_ty))
        kept = tl.multiple_of(kept, 16)
        index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        there = index < width
        if left < planes - 1:
            copied = tl.load(kept + (left * total + position) * width + index, mask=there, other=0.0)
            for plane in range(left + 1, planes):
                tl.store(kept + (plane * total + position) * width + index, copied, mask=there)
