"""Interrupts of a device: its MSI-X vectors set up, and the messages that came counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plora.hw.defs.errors import UserError
from plora.hw.defs.registers import PENDING_BASE, global_offset, vector_offset
from plora.sw.driver import Driver

_ENABLE = 1

TakeMessages = Callable[[], Sequence[tuple[int, int]]]
"""Returns address and data of every message since the last call; all devices have it as ``take_interrupts``."""


class Interrupts:
    """The vectors of one device. Message ``data`` is the number of the vector.

    Every method raises UserError for a vector that the device lacks.

    Parameters:
        driver: the device.
        take: where its messages arrive.
        address: physical address to which the device is to write them.
    """

    def __init__(self, driver: Driver, take: TakeMessages, *, address: int = 0xFEE0_0000) -> None:
        self._driver = driver
        self._take = take
        self._address = address
        self._arrived = [0] * driver.config.queues
        driver.write_register(global_offset("MSIX"), _ENABLE)

    def open(self, vector: int) -> None:
        """Give ``vector`` its message and unmask it."""
        self._check(vector)
        entry = {"ADDRESS_LO": self._address & 0xFFFF_FFFF, "ADDRESS_HI": self._address >> 32, "DATA": vector}
        for name, value in entry.items():
            self._driver.write_register(vector_offset(vector, name), value)
        self.mask(vector, masked=False)

    def mask(self, vector: int, *, masked: bool) -> None:
        """Hold the messages of ``vector`` back, or let them go; one that is held back stays pending."""
        self._check(vector)
        self._driver.write_register(vector_offset(vector, "MASK"), int(masked))

    def pending(self, vector: int) -> bool:
        """True if the vector has a message that its mask holds back."""
        self._check(vector)
        return bool(self._driver.read_register(PENDING_BASE + vector // 32 * 4) >> vector % 32 & 1)

    def arrived(self, vector: int) -> int:
        """Messages of ``vector`` that came so far."""
        self._check(vector)
        for address, data in self._take():
            if address == self._address and data < len(self._arrived):
                self._arrived[data] += 1
        return self._arrived[vector]

    def _check(self, vector: int) -> None:
        if not 0 <= vector < len(self._arrived):
            raise UserError(f"MSI-X vector {vector}: this device has 0 ... {len(self._arrived) - 1}")


@dataclass(frozen=True)
class Notice:
    """How a queue tells its host of completions: by interrupts, each for one completion or for several."""

    interrupts: Interrupts
    vector: int
    completions: int = 1
    """Completions gathered for one message, 1 ... 65535."""
    wait_cycles: int = 0
    """Cycles after which the first of them is waited for no longer; 0: a message for each completion."""

    def __post_init__(self) -> None:
        if not 1 <= self.completions <= 0xFFFF:
            raise UserError(f"{self.completions} completions for one interrupt: choose 1 ... 65535")
        if not 0 <= self.wait_cycles < 1 << 32:
            raise UserError(f"interrupt delay of {self.wait_cycles} cycles: choose 0 ... {(1 << 32) - 1}")
