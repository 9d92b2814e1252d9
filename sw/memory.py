"""Host-managed device memory: who holds which range of it, and the layout of what lies there."""

from __future__ import annotations

from dataclasses import dataclass

from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import ceil_div
from plora.sim.functional.layout import (
    Matrix,
    gpu_operand_bytes,
    pack_operand,
    result_from_bytes,
    unpack_operand,
)


@dataclass(frozen=True)
class Region:
    """A range of device memory that somebody holds."""

    name: str
    address: int
    """DPA of its first byte."""
    size_bytes: int

    @property
    def end(self) -> int:
        """First DPA beyond it."""
        return self.address + self.size_bytes


class HdmAllocator:
    """Hands out ranges of ``[base, limit)``, each a multiple of ``alignment_bytes`` in place and size.

    First fit over an ordered list of gaps; a freed range is joined with its neighbours at once.

    Parameters:
        base, limit: DPA of the first byte and of the first byte beyond (the queue's window).
        alignment_bytes: granule, a power of two: the stripe size of the device.

    Raises:
        UserError: ``base`` is not aligned, or the range is empty.
    """

    def __init__(self, base: int, limit: int, alignment_bytes: int) -> None:
        if alignment_bytes < 1 or alignment_bytes & (alignment_bytes - 1):
            raise UserError(f"device memory alignment is {alignment_bytes}: choose a power of two")
        if base % alignment_bytes or not 0 <= base < limit:
            raise UserError(
                f"device memory from {base:#x} to {limit:#x}: choose a start that is a multiple of {alignment_bytes}"
                " and an end beyond it"
            )
        self._alignment = alignment_bytes
        self._gaps: list[tuple[int, int]] = [(base, limit - limit % alignment_bytes)]
        self._held: dict[int, Region] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds."""
        return sum(end - start for start, end in self._gaps)

    @property
    def held(self) -> tuple[Region, ...]:
        """The regions in use, by address."""
        return tuple(self._held[address] for address in sorted(self._held))

    def allocate(self, size_bytes: int, name: str, alignment_bytes: int = 1) -> Region:
        """Return a region of at least ``size_bytes`` (rounded up to the granule).

        Parameters:
            alignment_bytes: a stricter alignment than the allocator's own, a power of two.

        Raises:
            UserError: no gap is large enough, or a value makes no sense.
        """
        if size_bytes < 1 or alignment_bytes < 1 or alignment_bytes & (alignment_bytes - 1):
            raise UserError(
                f"device memory for {name}: {size_bytes} bytes aligned to {alignment_bytes}: choose at least one byte"
                " and a power of two"
            )
        alignment = max(alignment_bytes, self._alignment)
        size = ceil_div(size_bytes, self._alignment) * self._alignment
        for index, (start, end) in enumerate(self._gaps):
            address = ceil_div(start, alignment) * alignment
            if address + size <= end:
                rest = [(start, address), (address + size, end)]
                self._gaps[index : index + 1] = [gap for gap in rest if gap[0] < gap[1]]
                region = self._held[address] = Region(name, address, size)
                return region
        largest = max((end - start for start, end in self._gaps), default=0)
        raise UserError(
            f"device memory is full: {name} needs {size} bytes in one piece, {self.free_bytes} are free, the largest"
            f" piece has {largest}; free adapters, or choose a larger device"
        )

    def free(self, region: Region) -> None:
        """Give ``region`` back.

        Raises:
            UserError: it is not held (given back twice, or from elsewhere).
        """
        if self._held.get(region.address) != region:
            raise UserError(
                f"device memory region {region.name} at {region.address:#x} is not held: it was freed before"
            )
        del self._held[region.address]
        gaps: list[tuple[int, int]] = []
        for start, end in sorted([*self._gaps, (region.address, region.end)]):
            if gaps and gaps[-1][1] == start:
                gaps[-1] = (gaps[-1][0], end)
            else:
                gaps.append((start, end))
        self._gaps = gaps


__all__ = [
    "HdmAllocator",
    "Matrix",
    "Region",
    "gpu_operand_bytes",
    "pack_operand",
    "result_from_bytes",
    "unpack_operand",
]
