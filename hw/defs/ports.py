"""The outer ports of the device, name by name: what the RTL has and what a harness or a testbench drives.

All buses are flat: member ``awaddr`` of the bus ``s_mem`` is the port ``s_mem__awaddr``. Member names
are those of AXI, so that AXI tools find them by prefix.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.registers import MMIO_BITS

ADDRESS_BITS = 48
"""Bits of a byte address on ``s_mem`` (a DPA) and on ``m_axi_*`` (an offset in one channel)."""

DATA_BITS = 8 * WORD_BYTES
MEMORY_ID_BITS = 6
"""Transaction ids of ``m_axi_*``: who asked (bits 5:4), its watchdog's count (3:2), and a tag of the asker (1:0)."""

HOST_ID_BITS = 8
"""Transaction ids of ``s_mem``."""

MMIO_DATA_BITS = 32
MSIX_ADDRESS_BITS = 64
MSIX_DATA_BITS = 32

CLOCK, RESET = "clk", "rst"
HOST_BUS, MMIO_BUS, INTERRUPT_STREAM = "s_mem", "s_io", "msix"


class Burst(IntEnum):
    """How the address moves within an AXI burst."""

    FIXED = 0
    INCR = 1
    WRAP = 2


class Resp(IntEnum):
    """AXI response. Bit 1 is set in both errors."""

    OKAY = 0
    EXOKAY = 1
    SLVERR = 2
    DECERR = 3


class Member(NamedTuple):
    """One member of a bus: ``by_manager`` is true if the side that asks drives it."""

    name: str
    width: int
    by_manager: bool


class Port(NamedTuple):
    """One port of the device: ``output`` is true if the device drives it."""

    name: str
    width: int
    output: bool


def memory_bus(channel: int) -> str:
    """Name of the AXI4 bus of memory channel ``channel``; the device is its manager."""
    return f"m_axi_{channel}"


def axi4_members(id_bits: int) -> tuple[Member, ...]:
    """Members of an AXI4 bus with `ADDRESS_BITS` of address, `DATA_BITS` of data and ``id_bits`` of id."""

    def address(prefix: str) -> list[Member]:
        return [
            Member(f"{prefix}id", id_bits, True),
            Member(f"{prefix}addr", ADDRESS_BITS, True),
            Member(f"{prefix}len", 8, True),
            Member(f"{prefix}size", 3, True),
            Member(f"{prefix}burst", 2, True),
            Member(f"{prefix}valid", 1, True),
            Member(f"{prefix}ready", 1, False),
        ]

    return (
        *address("aw"),
        Member("wdata", DATA_BITS, True),
        Member("wstrb", DATA_BITS // 8, True),
        Member("wlast", 1, True),
        Member("wvalid", 1, True),
        Member("wready", 1, False),
        Member("bid", id_bits, False),
        Member("bresp", 2, False),
        Member("bvalid", 1, False),
        Member("bready", 1, True),
        *address("ar"),
        Member("rid", id_bits, False),
        Member("rdata", DATA_BITS, False),
        Member("rresp", 2, False),
        Member("rlast", 1, False),
        Member("rvalid", 1, False),
        Member("rready", 1, True),
    )


def axi4_lite_members() -> tuple[Member, ...]:
    """Members of the AXI4-Lite bus: `MMIO_BITS` of address, `MMIO_DATA_BITS` of data."""

    def address(prefix: str) -> list[Member]:
        return [
            Member(f"{prefix}addr", MMIO_BITS, True),
            Member(f"{prefix}prot", 3, True),
            Member(f"{prefix}valid", 1, True),
            Member(f"{prefix}ready", 1, False),
        ]

    return (
        *address("aw"),
        Member("wdata", MMIO_DATA_BITS, True),
        Member("wstrb", MMIO_DATA_BITS // 8, True),
        Member("wvalid", 1, True),
        Member("wready", 1, False),
        Member("bresp", 2, False),
        Member("bvalid", 1, False),
        Member("bready", 1, True),
        *address("ar"),
        Member("rdata", MMIO_DATA_BITS, False),
        Member("rresp", 2, False),
        Member("rvalid", 1, False),
        Member("rready", 1, True),
    )


def device_ports(config: NdpConfig) -> tuple[Port, ...]:
    """Every port of the device of ``config``, in the order of declaration."""
    ports = [Port(CLOCK, 1, False), Port(RESET, 1, False)]
    for channel in range(config.channels):
        ports += [Port(f"{memory_bus(channel)}__{m.name}", m.width, m.by_manager) for m in axi4_members(MEMORY_ID_BITS)]
    ports += [Port(f"{HOST_BUS}__{m.name}", m.width, not m.by_manager) for m in axi4_members(HOST_ID_BITS)]
    ports += [Port(f"{MMIO_BUS}__{m.name}", m.width, not m.by_manager) for m in axi4_lite_members()]
    # The payload holds the address in its low bits, the data above.
    ports += [
        Port(f"{INTERRUPT_STREAM}__payload", MSIX_ADDRESS_BITS + MSIX_DATA_BITS, True),
        Port(f"{INTERRUPT_STREAM}__valid", 1, True),
        Port(f"{INTERRUPT_STREAM}__ready", 1, False),
    ]
    return tuple(ports)
