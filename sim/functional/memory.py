"""Byte memory of any size that costs only what was written to it."""

from __future__ import annotations

PAGE_BYTES = 1 << 16


class MemoryFault(Exception):
    """An access beyond the end of memory, or to a bad part of it: what an AXI slave answers with an error."""


class SparseMemory:
    """``size_bytes`` bytes of memory in pages that come into being when they are first written.

    Parameters:
        size_bytes: the first address that does not exist.
        fill: value of every byte that was never written (tests poison memory with 0xFF or 0xA5).
    """

    def __init__(self, size_bytes: int, fill: int = 0) -> None:
        if size_bytes < 0 or not 0 <= fill <= 255:
            raise ValueError(f"memory of {size_bytes} bytes filled with {fill}: need a size of at least 0 and a byte")
        self.size_bytes = size_bytes
        self._blank = bytes([fill]) * PAGE_BYTES
        self._pages: dict[int, bytearray] = {}
        self._bad: list[tuple[int, int]] = []

    def add_error_range(self, address: int, size_bytes: int) -> None:
        """Let every later access to a byte of ``[address, address + size_bytes)`` fault, like poisoned memory."""
        self._bad.append((address, address + size_bytes))

    def clear_errors(self) -> None:
        """Forget every range of `add_error_range`."""
        self._bad.clear()

    @property
    def resident_bytes(self) -> int:
        """Bytes that the pages written so far occupy."""
        return len(self._pages) * PAGE_BYTES

    def _check(self, address: int, size_bytes: int) -> None:
        if address < 0 or size_bytes > self.size_bytes - address:
            raise MemoryFault(f"{size_bytes} bytes at {address:#x}: memory has {self.size_bytes} bytes")
        for start, end in self._bad:
            if address < end and start < address + size_bytes:
                raise MemoryFault(f"{size_bytes} bytes at {address:#x}: memory from {start:#x} to {end:#x} is in error")

    def read(self, address: int, size_bytes: int) -> bytes:
        """Return ``size_bytes`` bytes from ``address``.

        Raises:
            MemoryFault: a byte of them lies beyond the end, or in an error range.
        """
        self._check(address, size_bytes)
        pieces = []
        while size_bytes > 0:
            page, offset = divmod(address, PAGE_BYTES)
            length = min(size_bytes, PAGE_BYTES - offset)
            pieces.append(memoryview(self._pages.get(page, self._blank))[offset : offset + length])
            address += length
            size_bytes -= length
        return b"".join(pieces)

    def write(self, address: int, data: bytes) -> None:
        """Store ``data`` at ``address``.

        Raises:
            MemoryFault: a byte of it lies beyond the end, or in an error range; nothing is stored then.
        """
        self._check(address, len(data))
        view = memoryview(data)
        while view:
            page, offset = divmod(address, PAGE_BYTES)
            length = min(len(view), PAGE_BYTES - offset)
            target = self._pages.get(page)
            if target is None:
                target = self._pages[page] = bytearray(self._blank)
            target[offset : offset + length] = view[:length]
            address += length
            view = view[length:]
