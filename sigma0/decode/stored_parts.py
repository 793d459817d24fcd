"""The plain tensors that a weight is stored as: its own, or those of a shard or of a quantised weight."""

from torch import Tensor


def stored_parts(weight: Tensor) -> list[Tensor]:
    """What a tensor holds in memory.

    Args:
        weight: Any tensor. One that stands for others (a shard, integers with their scales) names them itself, by
            torch's protocol for such classes.
    """
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        return [weight]
    names, _ = flatten()
    return [part for name in names for part in stored_parts(getattr(weight, name))]
