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
    # beside tensors a shard names the processes that share it
    held = [getattr(weight, name) for name in names]
    return [part for each in held if isinstance(each, Tensor) for part in stored_parts(each)]
