"""The device as the host sees it: the abstract port that one host driver uses on every device.

The functional model, the timed model and the simulated RTL all implement `DevicePort`.
"""

from __future__ import annotations

from typing import Protocol

from plora.hw.defs.config import NdpConfig


class DevicePort(Protocol):
    """Plain loads and stores on host-managed device memory (HDM), MMIO, and the passing of time.

    HDM addresses are device physical addresses (DPA) in bytes. Writes are posted: two HDM writes
    may reach memory in any order, and in any order relative to MMIO, unless `hdm_fence` lies
    between them.
    """

    config: NdpConfig

    def hdm_write(self, address: int, data: bytes) -> None:
        """Store ``data`` at byte address ``address`` (posted, any alignment)."""
        ...

    def hdm_read(self, address: int, size_bytes: int) -> bytes:
        """Load ``size_bytes`` bytes. Sees every earlier store of the same host."""
        ...

    def hdm_fence(self) -> None:
        """Return once every earlier HDM write has been acknowledged by the device."""
        ...

    def mmio_write(self, offset: int, value: int) -> None:
        """Write a 32-bit register (byte offset, multiple of 4)."""
        ...

    def mmio_read(self, offset: int) -> int:
        """Read a 32-bit register (byte offset, multiple of 4)."""
        ...

    def wait(self, cycles: int) -> None:
        """Let the device run for about ``cycles`` core clock cycles."""
        ...
