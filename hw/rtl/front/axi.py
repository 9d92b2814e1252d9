"""AXI4 and AXI4-Lite as flat Amaranth signatures, made from `plora.hw.defs.ports`, and the interrupt stream."""

from __future__ import annotations

from amaranth.hdl import unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.ports import MSIX_ADDRESS_BITS, MSIX_DATA_BITS, Member, axi4_lite_members, axi4_members


def _flat(members: tuple[Member, ...]) -> dict[str, wiring.Member]:
    return {m.name: (Out if m.by_manager else In)(unsigned(m.width)) for m in members}


class Axi4Signature(wiring.Signature):
    """An AXI4 bus of 512 bits with ``id_bits`` of id, seen from the manager."""

    def __init__(self, id_bits: int) -> None:
        if not isinstance(id_bits, int) or id_bits < 1:
            raise TypeError(f"id_bits must be a positive integer, not {id_bits!r}")
        self._id_bits = id_bits
        super().__init__(_flat(axi4_members(id_bits)))

    @property
    def id_bits(self) -> int:
        """Bits of a transaction id."""
        return self._id_bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axi4Signature) and self._id_bits == other._id_bits

    def __repr__(self) -> str:
        return f"Axi4Signature({self._id_bits})"


class Axi4LiteSignature(wiring.Signature):
    """The AXI4-Lite bus of the registers, seen from the manager."""

    def __init__(self) -> None:
        super().__init__(_flat(axi4_lite_members()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axi4LiteSignature)

    def __repr__(self) -> str:
        return "Axi4LiteSignature()"


msix_layout = data.StructLayout({"address": MSIX_ADDRESS_BITS, "data": MSIX_DATA_BITS})
"""An interrupt: write ``data`` to the host's physical ``address``."""


def msix_signature() -> stream.Signature:
    """The interrupt stream, seen from the device."""
    return stream.Signature(msix_layout)
