"""Host writes on their way to the device: in order, or as late and as shuffled as the fabric allows."""

from __future__ import annotations

import random
from collections.abc import Callable

from plora.hw.defs.queue import LINE_BYTES

LONGEST_FLIGHT_CYCLES = 1000
"""A microsecond at 1 GHz: several round trips of a CXL link."""


class PostedWrites:
    """HDM and MMIO writes between host and device.

    Without a seed they take effect at once. With one, an HDM write is cut into 64-byte lines, and
    lines wait until a fence, or until chance lets them land (`land_some`) in any order, except that two
    writes to the same line keep theirs. MMIO writes keep their own order but may be overtaken by, and
    overtake, HDM writes.

    Parameters:
        hdm_write, mmio_write: apply a write to the device.
        seed: seed of the disorder, or None for none.
    """

    def __init__(
        self,
        hdm_write: Callable[[int, bytes], None],
        mmio_write: Callable[[int, int], None],
        seed: int | None,
    ) -> None:
        self._hdm_write = hdm_write
        self._mmio_write = mmio_write
        self._random = None if seed is None else random.Random(seed)
        self._lines: dict[int, list[tuple[int, bytes]]] = {}
        self._mmio: list[tuple[int, int]] = []

    @property
    def pending(self) -> int:
        """Writes that have not landed yet."""
        return sum(map(len, self._lines.values())) + len(self._mmio)

    def hdm(self, address: int, data: bytes) -> None:
        """Post an HDM write."""
        if self._random is None:
            self._hdm_write(address, data)
            return
        while data:
            line = address // LINE_BYTES
            length = min(len(data), (line + 1) * LINE_BYTES - address)
            self._lines.setdefault(line, []).append((address, data[:length]))
            address, data = address + length, data[length:]

    def mmio(self, offset: int, value: int) -> None:
        """Post an MMIO write."""
        if self._random is None:
            self._mmio_write(offset, value)
        else:
            self._mmio.append((offset, value))

    def overlay(self, address: int, data: bytes) -> bytes:
        """Return ``data``, read from memory at ``address``, as the writer must see it: with its pending writes."""
        if not self._lines:
            return data
        seen = bytearray(data)
        end = address + len(data)
        for line in range(address // LINE_BYTES, -(-end // LINE_BYTES)):
            for start, piece in self._lines.get(line, ()):
                low, high = max(start, address), min(start + len(piece), end)
                if low < high:
                    seen[low - address : high - address] = piece[low - start : high - start]
        return bytes(seen)

    def fence(self) -> None:
        """Let every HDM write land."""
        for writes in self._lines.values():
            for address, piece in writes:
                self._hdm_write(address, piece)
        self._lines.clear()

    def drain_mmio(self) -> None:
        """Let every MMIO write land: an MMIO read pushes them before it."""
        while self._mmio:
            self._mmio_write(*self._mmio.pop(0))

    def land_some(self, cycles: int) -> bool:
        """Let one pending write land, or none, as chance has it.

        Call it until it returns False: then it is enough for a wait of ``cycles``. None stays on its way for
        longer than `LONGEST_FLIGHT_CYCLES`.
        """
        if self._random is None or not self.pending:
            return False
        if cycles < LONGEST_FLIGHT_CYCLES and self._random.random() < 0.25:
            return False
        if self._mmio and (not self._lines or self._random.random() < 0.5):
            self._mmio_write(*self._mmio.pop(0))
            return True
        line = self._random.choice(list(self._lines))
        address, piece = self._lines[line].pop(0)
        if not self._lines[line]:
            del self._lines[line]
        self._hdm_write(address, piece)
        return True
