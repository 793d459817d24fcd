"""K/V planes in few bits: groups of numbers that share a scale, and planes as residuals to an anchor.

A group x of g neighbouring numbers of a head is stored as codes c of b bits and one scale s in bfloat16:

    x ~ s (c - 2^(b-1) + 1/2),  0 <= c < 2^b

The scale is the least-squares one of the codes, s = <x, l> / <l, l> with levels l = c - 2^(b-1) + 1/2, taken from a few
starts, max|x| among them; the one with the smallest error stays. Zeros are exact, and a group of one number repeated is
exact but for the rounding of its scale. No rotation.

With an anchor a, plane t != a stores the residual to the *decoded* anchor, so that errors do not add up:

    x_t ~ decode_a + s_t l_t

(ResidualQuant: the last loop anchors those before it, 2 bits each, itself 4, g = 16, which is 3.5 bits a number with
their scales where there are four loops.) Bytes for each number: b / 8 + 2 / g.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTHS = (1, 2, 4, 8)
SCALE_BYTES = 2
# Shares of the largest number that the search for a scale starts from: outliers are cut where that helps the others.
_STARTS = (1.0, 0.85, 0.7, 0.55)


@dataclass(frozen=True)
class KVQuantizer:
    """How the planes of a layer are stored.

    Attributes:
        bits: Of a code, for each plane: 1, 2, 4 or 8.
        anchor: Plane that the others are residuals to; None where every plane stands for itself.
        group: g, numbers of a head that share a scale.

    Raises:
        ValueError: For other widths, no plane, an anchor that is no plane, or a group that fills no bytes.
    """

    bits: tuple[int, ...]
    anchor: int | None = None
    group: int = 16

    def __post_init__(self) -> None:
        wrong = [bits for bits in self.bits if bits not in WIDTHS]
        if wrong or not self.bits:
            raise ValueError(f"planes are stored in {', '.join(map(str, WIDTHS))} bits, got {list(self.bits)}")
        if self.anchor is not None and not 0 <= self.anchor < len(self.bits):
            raise ValueError(f"the anchor is one of {len(self.bits)} planes, got {self.anchor}")
        if self.group < 8 or self.group % 8:
            raise ValueError(f"a group is a multiple of 8 numbers, got {self.group}")

    def check_width(self, width: int) -> None:
        """Refuses heads that are no whole number of groups.

        Raises:
            ValueError: Naming both.
        """
        if width % self.group:
            raise ValueError(f"heads of {width} numbers are no whole number of groups of {self.group}")

    @property
    def number_bits(self) -> float:
        """Bits of a number, its share of the scale included: the mean over the planes."""
        return sum(self.bits) / len(self.bits) + 8 * SCALE_BYTES / self.group

    def head_bytes(self, width: int) -> int:
        """Bytes of a head of `width` numbers over all planes."""
        return sum(width * bits // 8 for bits in self.bits) + len(self.bits) * SCALE_BYTES * width // self.group


def encode(numbers: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a plane, or of a residual.

    Args:
        numbers: `[..., d]`, any floating dtype.
        bits: Of a code.
        group: Numbers that share a scale.

    Returns:
        Codes, uint8 `[..., d * bits / 8]`, the first number in the lowest bits; scales, bfloat16 `[..., d / group]`.

    Raises:
        ValueError: If a number is infinite or NaN.
    """
    if not torch.isfinite(numbers).all():
        raise ValueError("K/V that are infinite or NaN cannot be stored in few bits")
    half = 2 ** (bits - 1)
    grouped = numbers.float().view(*numbers.shape[:-1], -1, group)  # [..., d / g, g]
    largest = grouped.abs().amax(-1, keepdim=True)
    best_error = torch.full_like(largest, torch.inf)
    best_scale, best_level = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in _STARTS if bits < 8 else _STARTS[:1]:
        scale = _rounded(largest * (start / (half - 0.5)))
        for refine in (True, False):
            level = _levels(grouped, scale, half)
            error = (grouped - scale * level).square().sum(-1, keepdim=True)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale, best_level = torch.where(better, scale, best_scale), torch.where(better, level, best_level)
            if refine:
                scale = _rounded((grouped * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True))
    codes = (best_level + (half - 0.5)).flatten(-2).to(torch.uint8)
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    packed = (codes.view(*codes.shape[:-1], -1, per_byte) << shifts).sum(-1, dtype=torch.uint8)
    return packed, best_scale.squeeze(-1).to(torch.bfloat16)


def decode(codes: Tensor, scales: Tensor, bits: int, group: int) -> Tensor:
    """The numbers of a plane, or of a residual, float32 `[..., d]`.

    Args:
        codes: uint8 `[..., d * bits / 8]`.
        scales: bfloat16 `[..., d / group]`.
        bits: Of a code.
        group: Numbers that share a scale.
    """
    shifts = torch.arange(8 // bits, device=codes.device, dtype=torch.uint8) * bits
    levels = ((codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2).float() - (2 ** (bits - 1) - 0.5)
    numbers: Tensor = levels.view(*scales.shape, group) * scales.float()[..., None]
    return numbers.flatten(-2)


def _levels(grouped: Tensor, scale: Tensor, half: int) -> Tensor:
    # a scale of 0 stands for zeros, whatever the codes are
    quotient = grouped / torch.where(scale > 0, scale, 1.0)
    return quotient.floor().clamp(-half, half - 1) + 0.5


def _rounded(scale: Tensor) -> Tensor:
    """Scales as bfloat16 has them."""
    return scale.clamp_min(0.0).to(torch.bfloat16).float()


class CodedPlanes:
    """Keys, or values, of one layer in few bits, plane by plane.

    Args:
        codec: How they are stored.
        positions: How many each plane has.
        heads: H_kv.
        width: d.
        device: Where they lie.

    Attributes:
        codec: See above.
        positions: See above.
        heads: See above.
        width: See above.
        codes: uint8, plane t from `offsets[t]` on, each `[positions, H_kv, d * bits / 8]`.
        offsets: Of each plane in `codes`.
        layout: Bits and offset of each plane for kernels, which look them up by row, int64 `[2, planes]`.
        scales: bfloat16 `[planes, positions, H_kv, d / group]`.
    """

    def __init__(self, codec: KVQuantizer, positions: int, heads: int, width: int, device: torch.device) -> None:
        codec.check_width(width)
        self.codec, self.positions, self.heads, self.width = codec, positions, heads, width
        sizes = [positions * heads * width * bits // 8 for bits in codec.bits]
        self.offsets = [sum(sizes[:plane]) for plane in range(len(sizes))]
        with torch.inference_mode(False):
            self.codes = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
            shape = (len(sizes), positions, heads, width // codec.group)
            self.scales = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            self.layout = torch.tensor([codec.bits, self.offsets], dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def plane_codes(self, plane: int) -> Tensor:
        """Codes of a plane, uint8 `[positions, H_kv, d * bits / 8]`, a view."""
        size = self.width * self.codec.bits[plane] // 8
        count = self.positions * self.heads * size
        return self.codes[self.offsets[plane] : self.offsets[plane] + count].view(self.positions, self.heads, size)

    def write(self, positions: Tensor, planes: Sequence[Tensor]) -> None:
        """Encodes positions in all planes.

        Args:
            positions: int64 `[N]`.
            planes: Each `[N, H_kv, d]`.

        Raises:
            ValueError: If a number is infinite or NaN; nothing is written then.
        """
        codec, anchored = self.codec, None
        coded: dict[int, tuple[Tensor, Tensor]] = {}
        if codec.anchor is not None:
            codes, scales = encode(planes[codec.anchor], codec.bits[codec.anchor], codec.group)
            coded[codec.anchor] = codes, scales
            anchored = decode(codes, scales, codec.bits[codec.anchor], codec.group)
        for bits in dict.fromkeys(codec.bits):
            # at once, since each of the small operations costs more than its work
            alike = [plane for plane, current in enumerate(codec.bits) if current == bits and plane not in coded]
            if not alike:
                continue
            numbers = torch.stack([planes[plane] for plane in alike])  # [planes, N, H_kv, d]
            codes, scales = encode(numbers if anchored is None else numbers.float() - anchored, bits, codec.group)
            coded.update(zip(alike, zip(codes, scales, strict=True), strict=True))
        for plane, (codes, scales) in coded.items():
            self.plane_codes(plane).index_copy_(0, positions, codes)
            self.scales[plane].index_copy_(0, positions, scales)

    def read(self, plane: int, positions: Tensor) -> Tensor:
        """Positions `[N]` of a plane, decoded, float32 `[N, H_kv, d]`."""
        anchor = self.codec.anchor
        numbers = self._stored(plane, positions)
        return numbers if anchor is None or anchor == plane else numbers + self._stored(anchor, positions)

    def copy_from(self, other: "CodedPlanes", positions: Tensor, sources: Tensor) -> None:
        """Takes positions `sources` `[N]` of other planes over to `positions` `[N]`."""
        for plane in range(len(self.codec.bits)):
            self.plane_codes(plane).index_copy_(0, positions, other.plane_codes(plane).index_select(0, sources))
            self.scales[plane].index_copy_(0, positions, other.scales[plane].index_select(0, sources))

    def _stored(self, plane: int, positions: Tensor) -> Tensor:
        codes = self.plane_codes(plane).index_select(0, positions)
        scales = self.scales[plane].index_select(0, positions)
        return decode(codes, scales, self.codec.bits[plane], self.codec.group)
