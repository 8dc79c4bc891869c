"""What a GPU can do at most, by the name that torch gives it: the roof over a roofline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceiling:
    """Dense bf16 matrix FLOP/s with float32 sums, and bytes/s of device memory, as the maker states them.

    Both are upper limits at the highest clocks, which a loaded GPU does not hold.
    """

    flops: float
    bandwidth: float
    source: str


_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 data sheet; half of the figure with sparsity"
_H200 = "NVIDIA H200 data sheet; half of the figure with sparsity"

CEILINGS = {
    "NVIDIA A100-SXM4-40GB": Ceiling(312e12, 1.555e12, _A100),
    "NVIDIA A100-PCIE-40GB": Ceiling(312e12, 1.555e12, _A100),
    "NVIDIA A100-SXM4-80GB": Ceiling(312e12, 2.039e12, _A100),
    "NVIDIA A100 80GB PCIe": Ceiling(312e12, 1.935e12, _A100),
    "NVIDIA H100 80GB HBM3": Ceiling(989.5e12, 3.35e12, _H100),
    "NVIDIA H100 PCIe": Ceiling(756e12, 2.0e12, _H100),
    "NVIDIA H200": Ceiling(989.5e12, 4.8e12, _H200),
}


def ceiling(name: str) -> Ceiling | None:
    """Return the ceiling of the GPU that torch calls `name`, None where the table does not know it."""
    return CEILINGS.get(name)
