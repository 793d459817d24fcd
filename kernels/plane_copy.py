"""Copies the K/V of positions from one plane of a layer to another.

    planes[target, p] = planes[source, p]   for each position p

Bytes for each position, with H_kv heads of d numbers of b bytes: read and write 4 H_kv d b, keys and values.
"""

import torch
from torch import Tensor


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
    run = torch.ops.sigma0.copy_plane if torch.compiler.is_compiling() else _copy_plane
    run(keys, values, positions, source, target)


def _copy_plane(keys: Tensor, values: Tensor, positions: Tensor, source: int, target: int) -> None:
    for planes in (keys, values):
        planes[target].index_copy_(0, positions, planes[source].index_select(0, positions))


def _nothing(keys: Tensor, values: Tensor, positions: Tensor, source: int, target: int) -> None:
    return None


# Not `torch.library.custom_op`, of which a call takes 20 us longer.
_LIBRARY = torch.library.Library("sigma0", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "copy_plane(Tensor(a!) keys, Tensor(b!) values, Tensor positions, int source, int target) -> ()"
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("copy_plane", _copy_plane, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::copy_plane", _nothing, lib=_LIBRARY)
