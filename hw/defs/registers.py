"""The register map (CXL.io MMIO, 32-bit registers), stated once.

Global registers start at 0, the block of queue q at ``QUEUE_BASE + q * QUEUE_STRIDE``, entry v of the
MSI-X table at ``VECTOR_BASE + v * VECTOR_STRIDE``, its pending bits at ``PENDING_BASE``. There are as many
vectors as queues. 64-bit values are two registers, low half first. Reads of absent addresses give 0;
writes to absent or read-only registers are ignored. A register is written whole: a write of some of its
bytes only is refused with SLVERR and changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

QUEUE_BASE = 0x1000
QUEUE_STRIDE = 0x80
MMIO_BITS = 16
"""Bits of an MMIO byte address."""

ID_VALUE = 0x41524C50
"""Reads as the bytes ``PLRA``."""
INTERFACE_VERSION = 2

VECTOR_BASE = 0x8000
VECTOR_STRIDE = 0x10
PENDING_BASE = 0xC000
"""Pending bit of vector v: bit v mod 32 of the register at ``PENDING_BASE + 4 * (v // 32)``, read-only."""

RESET_CHAIN_TIMEOUT = 1 << 20
"""CHAIN_TIMEOUT after reset: a millisecond at 1 GHz."""
RESET_CHAIN_LIMIT = 4096
"""CHAIN_LIMIT after reset: a chain that fills the longest ring."""
RESET_POLL_INTERVAL = 64
"""POLL_INTERVAL after reset, about one access to memory."""
RESET_WATCHDOG = 1 << 20
"""WATCHDOG after reset: a millisecond at 1 GHz."""
RESET_SHARE = 256
"""SHARE after reset: more words of the core than memory's latency can keep on their way, no bound for the host."""
COALESCE_TICK = 64
"""COALESCE_CYCLES is looked at every so many cycles."""
MAX_BACKOFF_LOG2 = 7
"""An empty slot is looked at every POLL_INTERVAL cycles, then every 2, 4 ... up to ``2**MAX_BACKOFF_LOG2`` as many."""


class Access(StrEnum):
    """Who may change a register."""

    RO = "RO"
    """Device only."""
    RW = "RW"
    """Host; a queue's RW registers other than those that say otherwise change only while the queue is disabled."""
    WO = "WO"
    """Host; reads as 0."""


class Register(NamedTuple):
    """One 32-bit register at byte ``offset`` of its block."""

    name: str
    offset: int
    access: Access
    doc: str


GLOBAL: tuple[Register, ...] = (
    Register("ID", 0x000, Access.RO, "constant, the bytes PLRA"),
    Register("INTERFACE", 0x004, Access.RO, "version of this interface"),
    Register("CAPS", 0x008, Access.RO, "bits 7:0 channels, 15:8 PE rows, 23:16 queues, 31:24 bits of a DPA"),
    Register("BUFFERS", 0x00C, Access.RO, "log2 of the bytes of: input (7:0), DRAM (15:8), output buffer (23:16)"),
    Register("CONTROL", 0x010, Access.RW, "bit 0: writing 1 clears the counters; reads as 0"),
    Register("STATUS", 0x014, Access.RO, "bit 0: work is under way"),
    Register("CHAIN_TIMEOUT", 0x018, Access.RW, "cycles to wait for the next descriptor of a chain"),
    Register(
        "POLL_INTERVAL",
        0x01C,
        Access.RW,
        "cycles between the first looks at a slot whose valid word was not there; then in doubling steps",
    ),
    Register(
        "WATCHDOG",
        0x020,
        Access.RW,
        "cycles for which memory may leave a channel's requester without an answer; then, within as many again, "
        "whatever is owed to it is answered with errors; 0: for ever",
    ),
    Register(
        "SHARE",
        0x024,
        Access.RW,
        "on each channel at most so many words (15:0) read by the core, and so many loads and so many stores "
        "(31:16) of the host, are on their way at a time; 0: no bound but the device's own",
    ),
    Register(
        "MSIX",
        0x028,
        Access.RW,
        "bit 0 enable, bit 1 mask all vectors; a vector that is masked, or not enabled, stays pending",
    ),
    Register(
        "CHAIN_LIMIT",
        0x02C,
        Access.RW,
        "bits 15:0: descriptors after which a chain is closed, since other queues wait for its end; 0: no bound",
    ),
    Register("CYCLES_LO", 0x040, Access.RO, "clock cycles since the counters were cleared, low half"),
    Register("CYCLES_HI", 0x044, Access.RO, "high half, as it was when CYCLES_LO was read last"),
    Register("BEATS", 0x048, Access.RO, "stripes that the PE array multiplied"),
    Register("SPAN", 0x04C, Access.RO, "cycles from the first to the last beat of each descriptor, summed"),
    Register("STALL_WEIGHTS", 0x050, Access.RO, "cycles of SPAN without a beat: no weight word, or scales"),
    Register(
        "STALL_INPUT",
        0x054,
        Access.RO,
        "cycles, outside SPAN, in which the next descriptor waited for its operand alone",
    ),
    Register("STALL_DRAIN", 0x058, Access.RO, "cycles of SPAN without a beat: the drain was busy"),
    Register("WORDS_READ", 0x05C, Access.RO, "64-byte words that the core read from memory"),
    Register("WORDS_WRITTEN", 0x060, Access.RO, "64-byte words that the core wrote to memory"),
    Register("DESCRIPTORS", 0x064, Access.RO, "descriptors completed, whatever their status"),
    Register("ERRORS", 0x068, Access.RO, "descriptors completed with a status other than OK"),
    Register("WATCHDOG_TRIPS", 0x06C, Access.RO, "times that a requester of a channel got errors from the watchdog"),
)

QUEUE: tuple[Register, ...] = (
    Register(
        "CTRL",
        0x00,
        Access.RW,
        "bit 0 enable, bit 1 interrupt on completion (both at any time); 1 to 0 of bit 0 drops the queue's work: "
        "what is under way ends without a completion, and the queue can be enabled again once QSTATUS bit 1 is 0",
    ),
    Register("QSTATUS", 0x04, Access.RO, "bit 0 enabled, bit 1 a descriptor is under way (while disabled: or a read)"),
    Register("PASID", 0x08, Access.RW, "bits 19:0: the process to which the queue is bound"),
    Register("DEPTH", 0x0C, Access.RW, "slots in each ring, 2 ... 4096"),
    Register("BASE_LO", 0x10, Access.RW, "first DPA that this queue may touch"),
    Register("BASE_HI", 0x14, Access.RW, "high half"),
    Register("LIMIT_LO", 0x18, Access.RW, "first DPA beyond those that this queue may touch"),
    Register("LIMIT_HI", 0x1C, Access.RW, "high half"),
    Register("SQ_BASE_LO", 0x20, Access.RW, "DPA of submission slot 0, a multiple of the stripe size"),
    Register("SQ_BASE_HI", 0x24, Access.RW, "high half"),
    Register("CQ_BASE_LO", 0x28, Access.RW, "DPA of result slot 0, a multiple of 64"),
    Register("CQ_BASE_HI", 0x2C, Access.RW, "high half"),
    Register("SLOTS", 0x30, Access.RW, "log2 of the bytes of a submission slot (4:0) and of a result slot (12:8)"),
    Register("PASS", 0x34, Access.RW, "bits 23:0: number of the first pass after enabling"),
    Register("DOORBELL", 0x38, Access.WO, "any write: look at the next slot; a hint, the value is ignored"),
    Register(
        "CQ_HEAD",
        0x3C,
        Access.RW,
        "at any time: completions that the host has taken since enabling, modulo 2**16; other values are ignored",
    ),
    Register("SQ_HEAD", 0x40, Access.RO, "descriptors fetched since enabling, modulo 2**16"),
    Register("CQ_TAIL", 0x44, Access.RO, "completions written since enabling, modulo 2**16"),
    Register("QERRORS", 0x48, Access.RO, "ignored writes (bad CQ_HEAD, refused enable) and failed descriptors"),
    Register("VECTOR", 0x50, Access.RW, "bits 7:0: MSI-X vector of its interrupt; one that the device lacks: none"),
    Register(
        "COALESCE",
        0x54,
        Access.RW,
        "bits 15:0: completions that are gathered for one interrupt; 0 and 1: an interrupt for each",
    ),
    Register(
        "COALESCE_CYCLES",
        0x58,
        Access.RW,
        "cycles, in steps of 64, after which the first of them is waited for no longer; 0: not at all",
    ),
    Register("WEIGHT", 0x5C, Access.RW, "bits 7:0: slots read in one turn before another queue has its own; 0: one"),
)

VECTOR: tuple[Register, ...] = (
    Register("ADDRESS_LO", 0x0, Access.RW, "where the message is written: a physical address of the host"),
    Register("ADDRESS_HI", 0x4, Access.RW, "high half"),
    Register("DATA", 0x8, Access.RW, "what is written"),
    Register("MASK", 0xC, Access.RW, "bit 0: hold messages back; 1 after reset"),
)
"""One entry of the MSI-X table. Address and data change only while the vector is masked, or messages may be torn."""

_GLOBAL = {register.name: register.offset for register in GLOBAL}
_QUEUE = {register.name: register.offset for register in QUEUE}
_VECTOR = {register.name: register.offset for register in VECTOR}


def global_offset(name: str) -> int:
    """MMIO byte offset of a global register (KeyError if there is none of that name)."""
    return _GLOBAL[name]


def queue_offset(queue: int, name: str) -> int:
    """MMIO byte offset of a register of queue ``queue`` (KeyError if there is none of that name)."""
    return QUEUE_BASE + queue * QUEUE_STRIDE + _QUEUE[name]


def vector_offset(vector: int, name: str) -> int:
    """MMIO byte offset of a register of MSI-X vector ``vector`` (KeyError if there is none of that name)."""
    return VECTOR_BASE + vector * VECTOR_STRIDE + _VECTOR[name]
