"""The Verilated device as a `DevicePort`, in this process.

The C++ test bench (`cpp/harness.cpp`) owns clock, memory timing, random stalls and protocol checks;
this module owns the bytes of the device's memory, which both see without a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from plora.hw.build.device import device_library
from plora.hw.build.verilator import build_library
from plora.hw.build.verilog import TOP
from plora.hw.cosim.library import Counters, Events, Settings, Window, open_library
from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.errors import UserError
from plora.hw.defs.ports import Resp

DEFAULT_DRAM_BYTES = 1 << 30
_CHUNK_CYCLES = 100_000
"""Cycles per call into C++: between calls, an interrupt from the keyboard is seen."""


class RtlError(RuntimeError):
    """The simulated device broke a rule of its ports, failed an assertion, or never answered.

    The message names the cycle, the port and the rule. The simulation cannot go on after it.
    """


class AccessError(RuntimeError):
    """A load, store or register access of the host was answered with an error response."""


class ResponseOrder(IntEnum):
    """How far the memory's answers may leave the order of the requests, across AXI ids."""

    IN_ORDER = 0
    BURSTS = 1
    """Whole bursts overtake each other."""
    BEATS = 2
    """Beats of bursts with different ids are mixed."""


class Interrupt(NamedTuple):
    """An MSI-X message that the device sent."""

    cycle: int
    address: int
    data: int


class ChannelCounters(NamedTuple):
    """Traffic of one memory channel since reset; a beat is 64 bytes."""

    read_bursts: int
    read_beats: int
    write_bursts: int
    write_beats: int


class AllowedWindow(NamedTuple):
    """DPA ``[first, end)``, in which ``requesters`` of the channels may read, or write, or both."""

    first: int
    end: int
    requesters: Sequence[int]
    """0 core, 1 host, 2 queues: bits 5:4 of a transaction id."""
    reads: bool = True
    writes: bool = True


def _mask(requesters: Sequence[int]) -> int:
    return sum(1 << requester for requester in requesters)


class RtlDevice:
    """The Verilated device with memory and host around it, as a `DevicePort`. Built at first use.

    Args:
        config: sizes of the device.
        verilog: Verilog of another design with the same outer ports; default the device itself.
        top: name of its top module.
        dram_bytes: bytes of device memory, at DPA 0; default all that the configuration addresses, up
            to 1 GiB. Pages that nobody touches cost nothing.
        seed: decides every random choice of the test bench.
        stall: probability, 0 ... 0.9, that a side of the test bench is not ready (or offers nothing) in a
            cycle, drawn for each AXI channel separately.
        read_latency_cycles: cycles from the acceptance of a read address to its data, at least.
        write_latency_cycles: cycles from the last write beat to its response, at least. Written data is
            visible only when the response is offered.
        latency_jitter_cycles: up to so many cycles are added to both.
        max_bursts: reads, and writes, that each channel takes on before it holds back.
        response_order: how far answers of one channel may overtake each other.
        address_waits_for_data: the memory accepts write addresses only once data was offered, as AXI allows.
        host_outstanding: host loads, and host stores, under way at a time, 1 ... 64.
        host_reorder: posted host stores reach the device in random order (until a fence).
        host_delay_cycles: each posted host store is held back for up to so many cycles.
        timeout_cycles: the longest wait for an answer to the host.
        trace: wave file to write, ``.vcd`` or ``.fst`` by its name; slower.

    Raises:
        UserError: a tool is missing, the build failed, or a parameter is out of range.
    """

    def __init__(
        self,
        config: NdpConfig,
        *,
        verilog: str | None = None,
        top: str = TOP,
        dram_bytes: int | None = None,
        seed: int = 1,
        stall: float = 0.0,
        read_latency_cycles: int = 40,
        write_latency_cycles: int = 20,
        latency_jitter_cycles: int = 0,
        max_bursts: int = 64,
        response_order: ResponseOrder = ResponseOrder.IN_ORDER,
        address_waits_for_data: bool = False,
        host_outstanding: int = 16,
        host_reorder: bool = False,
        host_delay_cycles: int = 0,
        timeout_cycles: int = 1_000_000,
        trace: Path | str | None = None,
    ) -> None:
        self._handle: int | None = None
        self._messages_taken = 0
        stripe = config.channels * WORD_BYTES
        if dram_bytes is None:
            dram_bytes = min(1 << config.dpa_bits, DEFAULT_DRAM_BYTES)
        if not 0 < dram_bytes <= 1 << config.dpa_bits or dram_bytes % stripe:
            raise UserError(
                f"dram_bytes is {dram_bytes}: choose a multiple of {stripe} up to 2**{config.dpa_bits}"
                f" for device configuration {config.name!r}"
            )
        if not 0.0 <= stall <= 0.9:
            raise UserError(f"stall is {stall}: choose a probability of 0 ... 0.9")
        if not 1 <= host_outstanding <= 64:
            raise UserError(f"host_outstanding is {host_outstanding}: choose 1 ... 64")
        trace_format = None if trace is None else Path(trace).suffix.lstrip(".")
        if trace_format not in (None, "vcd", "fst"):
            raise UserError(f"wave file {trace} must end in .vcd or .fst")
        self.config = config
        self.memory: npt.NDArray[np.uint8] = np.zeros(dram_bytes, np.uint8)
        """The device's DRAM: byte i is DPA i. The back door; see `peek` and `poke`."""
        if verilog is None:
            path = device_library(config, trace=trace_format)
        else:
            path = build_library(verilog, top=top, channels=config.channels, trace=trace_format)
        self._library = open_library(path)
        # Kept: the test bench reads the path through this structure.
        self._settings = Settings(
            memory=self.memory.ctypes.data,
            memory_bytes=dram_bytes,
            seed=seed % (1 << 64),
            stall=int(stall * 2**32),
            read_latency_cycles=read_latency_cycles,
            write_latency_cycles=write_latency_cycles,
            latency_jitter_cycles=latency_jitter_cycles,
            max_bursts=max_bursts,
            response_order=int(response_order),
            address_waits_for_data=address_waits_for_data,
            host_outstanding=host_outstanding,
            host_reorder=host_reorder,
            host_delay_cycles=host_delay_cycles,
            timeout_cycles=timeout_cycles,
            trace_path=str(trace).encode() if trace is not None else None,
        )
        self._handle = self._library.ndp_create(ctypes.byref(self._settings))

    # The device port.

    def hdm_write(self, address: int, data: bytes) -> None:
        """Store ``data`` at byte address ``address`` (posted, any alignment)."""
        self._check_range(address, len(data))
        self._call(self._library.ndp_store, address, bytes(data), len(data))

    def hdm_read(self, address: int, size_bytes: int) -> bytes:
        """Load ``size_bytes`` bytes, after every earlier store to the same lines.

        Raises:
            AccessError: the device answered with an error.
        """
        self._check_range(address, size_bytes)
        buffer = ctypes.create_string_buffer(max(size_bytes, 1))
        self._call(self._library.ndp_load, address, buffer, size_bytes)
        self._raise_access_error(self._library.ndp_take_load_error, "load")
        return buffer.raw[:size_bytes]

    def hdm_fence(self) -> None:
        """Return once every earlier store has been acknowledged by the device.

        Raises:
            AccessError: the device answered one of them with an error.
        """
        self._call(self._library.ndp_fence)
        self._raise_access_error(self._library.ndp_take_store_error, "store")

    def mmio_write(self, offset: int, value: int) -> None:
        """Write a 32-bit register (byte offset, multiple of 4).

        Raises:
            AccessError: the device answered with an error.
        """
        self._call(self._library.ndp_mmio_write, self._register(offset), value & 0xFFFF_FFFF)
        self._check_mmio_response(offset)

    def mmio_read(self, offset: int) -> int:
        """Read a 32-bit register (byte offset, multiple of 4).

        Raises:
            AccessError: the device answered with an error.
        """
        value = ctypes.c_uint32()
        self._call(self._library.ndp_mmio_read, self._register(offset), ctypes.byref(value))
        self._check_mmio_response(offset)
        return value.value

    def wait(self, cycles: int) -> None:
        """Let the device run for ``cycles`` clock cycles."""
        while cycles > 0:
            chunk = min(cycles, _CHUNK_CYCLES)
            self._call(self._library.ndp_run, chunk)
            cycles -= chunk

    # Beyond the device port: the back door, and what the test bench saw.

    def poke(self, address: int, data: bytes | npt.NDArray[Any]) -> None:
        """Put bytes into memory at once, past the device: for large static data before a run."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data).view(np.uint8)
        self._check_range(address, raw.size)
        self.memory[address : address + raw.size] = raw.reshape(-1)

    def peek(self, address: int, size_bytes: int) -> bytes:
        """Return bytes of memory as they are now, past the device: posted stores may not be there yet."""
        self._check_range(address, size_bytes)
        return self.memory[address : address + size_bytes].tobytes()

    def reset(self) -> None:
        """Reset the device; memory keeps its contents, everything under way is dropped."""
        self._library.ndp_reset(self._alive())
        self._messages_taken = 0
        self._raise_fault()

    def inject_error(self, address: int, size_bytes: int) -> None:
        """Answer the device's accesses to these bytes of memory with SLVERR from now on."""
        self._check_range(address, size_bytes)
        self._library.ndp_add_error_range(self._alive(), address, address + size_bytes)

    def silence(self, address: int, size_bytes: int, requesters: Sequence[int], late_cycles: int = 0) -> None:
        """From now on leave accesses to these bytes unanswered, or answer them so many cycles later.

        ``requesters``: whose accesses, as in `AllowedWindow`.
        """
        self._check_range(address, size_bytes)
        mask = _mask(requesters)
        self._library.ndp_add_silence(self._alive(), address, address + size_bytes, mask, late_cycles)

    def allow(self, windows: Sequence[AllowedWindow]) -> None:
        """From now on an access of the device outside ``windows`` is a fault; none given: all may be touched."""
        raw = (Window * len(windows))(
            *(Window(w.first, w.end, _mask(w.requesters), w.reads, w.writes) for w in windows)
        )
        self._library.ndp_set_windows(self._alive(), raw, len(windows))

    def clear_errors(self) -> None:
        """Forget every range of `inject_error` and of `silence`."""
        self._library.ndp_clear_errors(self._alive())

    @property
    def cycles(self) -> int:
        """Clock cycles simulated so far, resets included."""
        cycles: int = self._library.ndp_cycle(self._alive())
        return cycles

    @property
    def interrupts(self) -> list[Interrupt]:
        """MSI-X messages since reset."""
        return self._messages(0)

    def _messages(self, first: int) -> list[Interrupt]:
        handle = self._alive()
        cycle, address, data = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint32()
        messages = []
        for index in range(first, self._library.ndp_interrupts(handle)):
            self._library.ndp_interrupt(handle, index, ctypes.byref(cycle), ctypes.byref(address), ctypes.byref(data))
            messages.append(Interrupt(cycle.value, address.value, data.value))
        return messages

    def take_interrupts(self) -> list[tuple[int, int]]:
        """Return address and data of every MSI-X message since the last call, or since reset."""
        messages = self._messages(self._messages_taken)
        self._messages_taken += len(messages)
        return [(message.address, message.data) for message in messages]

    @property
    def counters(self) -> list[ChannelCounters]:
        """Traffic of each memory channel since reset."""
        raw = Counters()
        result = []
        for channel in range(self.config.channels):
            self._library.ndp_counters(self._alive(), channel, ctypes.byref(raw))
            result.append(ChannelCounters(*(getattr(raw, name) for name in ChannelCounters._fields)))
        return result

    def clear_events(self) -> None:
        """Forget what `events` says."""
        self._library.ndp_clear_events(self._alive())

    @property
    def events(self) -> Events:
        """Cycles of the first and last accesses at the memory ports since they were cleared, by requester."""
        events = Events()
        self._library.ndp_events(self._alive(), ctypes.byref(events))
        return events

    def close(self) -> None:
        """End the simulation and close its wave file. Also done by ``with`` and by garbage collection."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.ndp_destroy(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _alive(self) -> int:
        if self._handle is None:
            raise ValueError("the simulated device was closed")
        return self._handle

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of `plora.hw.cosim.library` that lets time pass.

        Raises:
            RtlError: the device broke a rule, or did not answer.
        """
        self._call(getattr(self._library, name), *arguments)

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        if not function(self._alive(), *arguments):
            self._raise_fault()

    def _raise_fault(self) -> None:
        text: bytes = self._library.ndp_fault(self._alive())
        if text:
            self._library.ndp_flush(self._alive())
            raise RtlError(f"{self.config.name} device, {text.decode()} (seed {self._settings.seed})")

    def _check_range(self, address: int, size_bytes: int) -> None:
        if address < 0 or size_bytes < 0 or address + size_bytes > self.memory.size:
            raise UserError(
                f"bytes {address:#x} ... {address + size_bytes:#x} are not within the device's memory"
                f" of {self.memory.size} bytes"
            )

    def _register(self, offset: int) -> int:
        if offset % 4 or not 0 <= offset < 1 << 16:
            raise UserError(f"register offset {offset:#x} is not a multiple of 4 below 0x10000")
        return offset

    def _check_mmio_response(self, offset: int) -> None:
        response = self._library.ndp_mmio_response(self._alive())
        if response:
            raise AccessError(f"register {offset:#x} answered {Resp(response).name}")

    def _raise_access_error(self, take: Callable[..., int], kind: str) -> None:
        address = ctypes.c_uint64()
        response = take(self._alive(), ctypes.byref(address))
        if response:
            raise AccessError(f"host {kind} of the line at DPA {address.value:#x} answered {Resp(response).name}")
