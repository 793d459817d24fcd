import torch
from torch import Tensor
_M = 0xFFFFFFFF
def _mix(x: Tensor) -> Tensor:
    x = x & _M
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _M
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _M
    return x ^ (x >> 16)
def _key(seeds: Tensor, positions: Tensor, purposes: Tensor) -> Tensor:
    k = _mix(seeds & _M) ^ _mix((seeds >> 32) + 0x9E3779B9)
    return _mix(_mix(k + positions * 0x85EBCA6B) + purposes * 0xC2B2AE35)
def uniform(seeds: Tensor, positions: Tensor, purposes: Tensor) -> Tensor:
    return (_mix(_key(seeds, positions, purposes) + 0x27D4EB2F) >> 8).float() * 2**-24
def draw(scores: Tensor, seeds: Tensor, positions: Tensor, purposes: Tensor) -> Tensor:
    ids = torch.arange(scores.shape[1], device=scores.device)
    u = ((_mix(_key(seeds, positions, purposes)[:, None] + _mix(ids * 0x9E3779B1 + 0x165667B1)) >> 8).float() + 0.5) * 2**-24
    return (scores - torch.log(-torch.log(u))).argmax(-1)
