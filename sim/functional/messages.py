"""MSI-X of the functional device: the vector table, its masks, and messages sent or pending."""

from __future__ import annotations

from plora.hw.defs.registers import PENDING_BASE, VECTOR, VECTOR_BASE, VECTOR_STRIDE

_BY_OFFSET = {register.offset: register.name for register in VECTOR}
_ENABLE, _MASK_ALL = 1, 2


class MessageTable:
    """The vectors of a device, and what they sent.

    Parameters:
        vectors: entries of the table.
    """

    def __init__(self, vectors: int) -> None:
        self._entries = [{register.name: int(register.name == "MASK") for register in VECTOR} for _ in range(vectors)]
        self._pending = [False] * vectors
        self._control = 0
        self.sent: list[tuple[int, int]] = []
        """Address and data of each message."""
        self._taken = 0

    @property
    def control(self) -> int:
        """Register MSIX."""
        return self._control

    @control.setter
    def control(self, value: int) -> None:
        self._control = value & (_ENABLE | _MASK_ALL)
        self._deliver()

    @staticmethod
    def owns(offset: int) -> bool:
        """True if the MMIO offset lies where the table or its pending bits are."""
        return offset >= VECTOR_BASE

    def read(self, offset: int) -> int:
        """Return a register of the table or of the pending bits; 0 where there is none."""
        if offset >= PENDING_BASE:
            first = 8 * (offset - PENDING_BASE)
            return sum(bit << i for i, bit in enumerate(self._pending[first : first + 32]))
        vector, place = divmod(offset - VECTOR_BASE, VECTOR_STRIDE)
        return self._entries[vector].get(_BY_OFFSET.get(place, ""), 0) if vector < len(self._entries) else 0

    def write(self, offset: int, value: int) -> None:
        """Write a register of the table."""
        vector, place = divmod(offset - VECTOR_BASE, VECTOR_STRIDE)
        if offset < PENDING_BASE and vector < len(self._entries) and place in _BY_OFFSET:
            name = _BY_OFFSET[place]
            self._entries[vector][name] = value & 1 if name == "MASK" else value
            self._deliver()

    def signal(self, vector: int) -> None:
        """Let ``vector`` send a message as soon as its mask allows it; a vector that is not there sends none."""
        if vector < len(self._pending):
            self._pending[vector] = True
            self._deliver()

    def take(self) -> list[tuple[int, int]]:
        """Return the messages since the last call."""
        first, self._taken = self._taken, len(self.sent)
        return self.sent[first:]

    def _deliver(self) -> None:
        if self._control != _ENABLE:
            return
        for vector, entry in enumerate(self._entries):
            if self._pending[vector] and not entry["MASK"]:
                self._pending[vector] = False
                self.sent.append((entry["ADDRESS_HI"] << 32 | entry["ADDRESS_LO"], entry["DATA"]))
