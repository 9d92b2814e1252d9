"""A device found, checked and set up, and what the host moved over the link to it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from plora.hw.defs.config import PE_ROWS
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import ceil_div
from plora.hw.defs.port import DevicePort
from plora.hw.defs.queue import LINE_BYTES
from plora.hw.defs.registers import (
    GLOBAL,
    ID_VALUE,
    INTERFACE_VERSION,
    RESET_CHAIN_LIMIT,
    RESET_CHAIN_TIMEOUT,
    RESET_POLL_INTERVAL,
    RESET_SHARE,
    RESET_WATCHDOG,
    Access,
    global_offset,
)

REGISTER_BITS = 32
REGISTER_BYTES = REGISTER_BITS // 8


class DeviceError(UserError):
    """The device is absent, answers nonsense, or did not answer in time."""


@dataclass
class LinkTraffic:
    """Bytes that the host moved over the link, by purpose. HDM is charged by whole 64-byte lines."""

    load_bytes: int = 0
    """Device operands, when they were loaded."""
    fetch_bytes: int = 0
    """Device operands that were read back, to be copied."""
    submission_bytes: int = 0
    """Descriptors with their valid words."""
    operand_bytes: int = 0
    """GPU operands."""
    result_bytes: int = 0
    completion_bytes: int = 0
    """Completion lines that were there when they were read."""
    poll_bytes: int = 0
    """Completion lines that were not there yet."""
    mmio_bytes: int = 0
    """Registers written and read: set-up, doorbells, CQ_HEAD."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(getattr(self, f.name) for f in fields(self))

    def since(self, earlier: LinkTraffic) -> LinkTraffic:
        """The traffic after ``earlier``, a copy taken before."""
        return LinkTraffic(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def plus(self, other: LinkTraffic) -> LinkTraffic:
        """The traffic of both."""
        return LinkTraffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def copy(self) -> LinkTraffic:
        """A copy that does not change any more."""
        return LinkTraffic(**{f.name: getattr(self, f.name) for f in fields(self)})


def line_bytes(size_bytes: int) -> int:
    """Bytes of the whole lines that ``size_bytes`` from a line's start touch."""
    return ceil_div(size_bytes, LINE_BYTES) * LINE_BYTES


class Driver:
    """A device, found and checked, and what it counted.

    Parameters:
        port: the device.
        chain_timeout_cycles: how long the device may wait for the next descriptor of a chain.
        poll_interval_cycles: how often it looks at a slot that is not valid yet.
        watchdog_cycles: how long its memory may be silent before what is owed counts as failed; 0: for ever.
        chain_limit: descriptors after which the device closes a chain; 0: no bound.

    Raises:
        UserError: a value does not fit its register.
        DeviceError: there is no such device behind ``port``, or it is another than ``port.config`` says.
    """

    def __init__(
        self,
        port: DevicePort,
        *,
        chain_timeout_cycles: int = RESET_CHAIN_TIMEOUT,
        poll_interval_cycles: int = RESET_POLL_INTERVAL,
        watchdog_cycles: int = RESET_WATCHDOG,
        chain_limit: int = RESET_CHAIN_LIMIT,
    ) -> None:
        settings = {
            "CHAIN_TIMEOUT": (chain_timeout_cycles, REGISTER_BITS),
            "POLL_INTERVAL": (poll_interval_cycles, REGISTER_BITS),
            "WATCHDOG": (watchdog_cycles, REGISTER_BITS),
            "CHAIN_LIMIT": (chain_limit, 16),
        }
        for name, (value, bits) in settings.items():
            if not 0 <= value < 1 << bits:
                raise UserError(f"{name} is {value}: choose 0 ... {(1 << bits) - 1}")
        self.port = port
        self.config = port.config
        self.traffic = LinkTraffic()
        self._identify()
        for name, (value, _) in settings.items():
            self.write_register(global_offset(name), value)

    def _identify(self) -> None:
        found = self.read_register(global_offset("ID"))
        if found != ID_VALUE:
            raise DeviceError(f"no device: register ID reads {found:#010x}, not {ID_VALUE:#010x}; check the MMIO base")
        interface = self.read_register(global_offset("INTERFACE"))
        if interface != INTERFACE_VERSION:
            raise DeviceError(
                f"device speaks interface version {interface}, this host {INTERFACE_VERSION}; use matching releases"
            )
        config = self.config
        caps = self.read_register(global_offset("CAPS"))
        buffers = self.read_register(global_offset("BUFFERS"))
        sizes = [config.input_buffer_bytes, config.dram_buffer_bytes, config.output_buffer_bytes]
        expected = (
            config.channels | PE_ROWS << 8 | config.queues << 16 | config.dpa_bits << 24,
            sum((size.bit_length() - 1) << 8 * i for i, size in enumerate(sizes)),
        )
        if (caps, buffers) != expected:
            raise DeviceError(
                f"device has CAPS {caps:#010x} and BUFFERS {buffers:#010x}, but {config.name!r} has {expected[0]:#010x}"
                f" and {expected[1]:#010x}; choose the configuration of this device"
            )

    def write_register(self, offset: int, value: int) -> None:
        """Write a register (posted)."""
        self.traffic.mmio_bytes += REGISTER_BYTES
        self.port.mmio_write(offset, value)

    def read_register(self, offset: int) -> int:
        """Read a register."""
        self.traffic.mmio_bytes += REGISTER_BYTES
        return self.port.mmio_read(offset)

    def share(self, *, core_words: int = RESET_SHARE, host_lines: int = 0) -> None:
        """Divide the bandwidth of memory between core and host by what each may have on its way on a channel.

        Parameters:
            core_words: words that the core reads, 0 ... 65535; fewer than the memory's latency in cycles
                slow the core down. 0: no bound.
            host_lines: loads, and stores, of the host. 0: no bound but the device's own.

        Raises:
            UserError: a value is out of range.
        """
        for what, value in (("core_words", core_words), ("host_lines", host_lines)):
            if not 0 <= value <= 0xFFFF:
                raise UserError(f"{what} is {value}: choose 0 ... 65535")
        self.write_register(global_offset("SHARE"), core_words | host_lines << 16)

    def load(self, address: int, data: bytes) -> None:
        """Store a device operand; it is there once the next fence returned, which every submission has."""
        self.traffic.load_bytes += line_bytes(len(data))
        self.port.hdm_write(address, data)

    def fetch(self, address: int, size_bytes: int) -> bytes:
        """Read back what `load` stored."""
        self.traffic.fetch_bytes += line_bytes(size_bytes)
        return self.port.hdm_read(address, size_bytes)

    def counters(self) -> dict[str, int]:
        """The device's counters by register name, CYCLES as one value."""
        values = {
            register.name: self.read_register(register.offset)
            for register in GLOBAL
            if register.access is Access.RO and register.offset >= global_offset("CYCLES_LO")
        }
        low, high = values.pop("CYCLES_LO"), values.pop("CYCLES_HI")
        return {"CYCLES": high << 32 | low, **values}

    def clear_counters(self) -> None:
        """Set all counters to zero."""
        self.write_register(global_offset("CONTROL"), 1)
