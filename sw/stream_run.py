"""Runs a descriptor stream on the simulated RTL: every completion with its cycle, every result against a model's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, Descriptor, DType, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import INTEGER_MIN_COLUMNS, expansion_log2, pack_geometry, pack_geometry_transposed
from plora.hw.defs.port import DevicePort
from plora.hw.defs.queue import (
    LINE_BYTES,
    RESULT_OFFSET,
    VALID_OFFSET,
    Completion,
    operand_offset,
    valid_word,
)
from plora.hw.defs.registers import GLOBAL, Access, global_offset, queue_offset
from plora.hw.defs.status import Status
from plora.sim.device.stream import Entry, Stream
from plora.sim.functional.device import FunctionalDevice
from plora.sim.functional.layout import (
    gpu_operand_bytes,
    pack_integers,
    pack_operand,
    pack_transposed,
    pack_transposed_integers,
)
from plora.sim.golden.bf16 import from_float
from plora.sim.golden.integers import quantize

FIRST_PASS = 1
_ENABLE = 1
_NEVER = 0xFFFF_FFFF


class SimulatedDevice(DevicePort, Protocol):
    """What is used of `plora.hw.cosim.device.RtlDevice` beyond the device port."""

    memory: npt.NDArray[np.uint8]

    @property
    def cycles(self) -> int:
        """Clock cycles so far."""
        ...

    def poke(self, address: int, data: bytes | npt.NDArray[Any]) -> None:
        """Put bytes into memory at once."""
        ...


@dataclass(frozen=True)
class Finished:
    """What became of one descriptor."""

    entry: Entry
    status: int
    cycles: int
    """First to last beat, as the device reports it."""
    completed_cycle: int
    """Cycle, from the start of the run, in which the completion line was in memory."""
    result_bytes: int


@dataclass(frozen=True)
class StreamRun:
    """A stream that was run."""

    finished: tuple[Finished, ...]
    """In the order of the stream."""
    counters: dict[str, int]
    """Of the device, by register name; those of the whole run."""
    start_cycle: int
    """Cycle of the device in which the run began; set-up lies before it."""
    simulated_cycles: int
    """All of them, set-up included."""

    @property
    def total_cycles(self) -> int:
        """From the start of the run to the last completion."""
        return max(done.completed_cycle for done in self.finished)


def operands(entry: Entry, config: NdpConfig) -> tuple[bytes, bytes]:
    """The device operand as packed, and the GPU operand as it lies in the slot; standard normal, by the entry's seed.

    Empty where the descriptor has none, or one that cannot be: an illegal shape.
    """
    d = entry.descriptor
    rng = np.random.default_rng(entry.seed)
    device = gpu = b""
    if d.device_rows and d.device_columns and _packed_bytes(d, config) <= MAX_OPERAND_BYTES:
        values = _random_values(rng, (d.device_rows, d.device_columns), d.dtype)
        device = _packed(values, d, config)
    if d.source == Source.SLOT and d.gpu_rows and d.gpu_columns and d.gpu_rows * d.gpu_columns < 1 << 19:
        rng = np.random.default_rng((entry.seed, 1))
        values = _random_values(rng, (d.gpu_rows, d.gpu_columns), d.dtype)
        gpu = gpu_operand_bytes(values, config)
    return device, gpu


def _random_values(rng: np.random.Generator, shape: tuple[int, int], dtype: int) -> npt.NDArray[Any]:
    """Standard normal values as bit patterns of the type."""
    values = rng.standard_normal(shape, dtype=np.float32)
    return from_float(values) if dtype == DType.BF16 else values.astype(np.float16)


def _packed_bytes(d: Descriptor, config: NdpConfig) -> int:
    if d.transpose:
        return pack_geometry_transposed(config, d.device_rows, d.device_columns, d.dtype).packed_bytes()
    return pack_geometry(config, d.device_rows, d.device_columns, d.dtype).packed_bytes


def _packed(values: npt.NDArray[Any], d: Descriptor, config: NdpConfig) -> bytes:
    """``values`` (N x K) as the device operand of ``d``, if need be as integers."""
    if d.transpose:
        geometry = pack_geometry_transposed(config, d.device_rows, d.device_columns, d.dtype)
        stride = geometry.stride(d.device_bytes)
        if expansion_log2(d.dtype):
            return pack_transposed_integers(quantize(values.T, d.dtype), config, d.dtype, stride)
        return pack_transposed(values.T, config, stride)
    if not expansion_log2(d.dtype):
        return pack_operand(values, config)
    if d.device_columns < INTEGER_MIN_COLUMNS:
        return b""  # the device refuses it
    return pack_integers(quantize(values, d.dtype), config, d.dtype)


def check_runnable(stream: Stream, dram_bytes: int) -> None:
    """Refuse what `run_stream` cannot run.

    Raises:
        UserError: a queue has more descriptors than a ring has slots, or memory is too small.
    """
    for queue, ring in stream.rings.items():
        count = sum(entry.queue == queue for entry in stream.entries)
        if count > ring.depth:
            raise UserError(
                f"queue {queue} has {count} descriptors, the RTL run takes {ring.depth} a queue: split the file"
            )
    end = max(entry.descriptor.device_address + entry.descriptor.device_bytes for entry in stream.entries)
    if end > dram_bytes:
        raise UserError(
            f"operands end at {end:#x}, the simulated memory has {dram_bytes} bytes: use fewer or share seeds"
        )


def load_operands(stream: Stream, poke: Any) -> None:
    """Put all operands where `plora.sim.device.stream.place` wants them, through ``poke(address, data)``."""
    stored: set[int] = set()
    for entry in stream.entries:
        device, gpu = operands(entry, stream.config)
        address = entry.descriptor.device_address
        if device and address not in stored:
            poke(address, device)
            stored.add(address)
        if gpu:
            poke(stream.submission_slot(entry) + operand_offset(stream.config), gpu)


def _enable(port: DevicePort, stream: Stream) -> None:
    port.mmio_write(global_offset("POLL_INTERVAL"), _NEVER)
    port.mmio_write(global_offset("CHAIN_TIMEOUT"), _NEVER)
    for queue, ring in stream.rings.items():
        values = {
            "PASID": queue + 1,
            "DEPTH": ring.depth,
            "BASE": ring.base,
            "LIMIT": ring.limit,
            "SQ_BASE": ring.submission_base,
            "CQ_BASE": ring.result_base,
            "SLOTS": ring.submission_slot_log2 | ring.result_slot_log2 << 8,
            "PASS": FIRST_PASS,
            "CTRL": _ENABLE,
        }
        for name, value in values.items():
            if name in ("BASE", "LIMIT", "SQ_BASE", "CQ_BASE"):
                port.mmio_write(queue_offset(queue, f"{name}_LO"), value & 0xFFFF_FFFF)
                port.mmio_write(queue_offset(queue, f"{name}_HI"), value >> 32)
            else:
                port.mmio_write(queue_offset(queue, name), value)


def _counters(port: DevicePort) -> dict[str, int]:
    values = {
        r.name: port.mmio_read(r.offset)
        for r in GLOBAL
        if r.access is Access.RO and r.offset > global_offset("CYCLES_HI")
    }
    return values


def run_stream(
    stream: Stream,
    device: SimulatedDevice,
    *,
    load: bool = True,
    settle_cycles: int = 2000,
    timeout_cycles: int = 10_000_000,
) -> StreamRun:
    """Run ``stream`` on ``device`` (fresh from reset) and time every completion.

    The host publishes a descriptor at its arrival cycle, by the back door, and rings the doorbell of its queue:
    once for all that arrive together. It takes no completions before the end; rings have room for all.

    Parameters:
        load: put operands into memory first; without, they are zeros, and take the same time.
        settle_cycles: from the enabling of the queues to the start of the run. Long enough, and the first
            looks at the empty slots have come back.
        timeout_cycles: longest run.

    Raises:
        UserError: see `check_runnable`; or the device did not complete everything in time.
    """
    check_runnable(stream, device.memory.size)
    if load:
        load_operands(stream, device.poke)
    _enable(device, stream)
    device.wait(settle_cycles)
    valid = valid_word(FIRST_PASS).to_bytes(4, "little")

    order = sorted(range(len(stream.entries)), key=lambda index: stream.entries[index].arrival_cycle)
    coming = deque(order)
    # By queue: indices of the entries that are to complete next.
    waiting = {queue: deque(i for i, e in enumerate(stream.entries) if e.queue == queue) for queue in stream.rings}
    done: dict[int, int] = {}
    device.mmio_write(global_offset("CONTROL"), 1)
    start = device.cycles

    def look() -> None:
        for queue in waiting.values():
            while queue:
                address = stream.result_slot(stream.entries[queue[0]]) + VALID_OFFSET
                if device.memory[address : address + 4].tobytes() != valid:
                    break
                done[queue.popleft()] = device.cycles - 1 - start

    while len(done) < len(stream.entries):
        now = device.cycles - start
        rung = set()
        while coming and stream.entries[coming[0]].arrival_cycle <= now:
            entry = stream.entries[coming.popleft()]
            device.poke(stream.submission_slot(entry), entry.submission_line(FIRST_PASS))
            rung.add(entry.queue)
        for queue in sorted(rung):
            device.mmio_write(queue_offset(queue, "DOORBELL"), 1)
        if not rung:
            device.wait(1)
        look()
        if now > timeout_cycles:
            left = len(stream.entries) - len(done)
            raise UserError(f"{left} descriptors were not completed within {timeout_cycles} cycles: raise the limit")

    finished = []
    for index, entry in enumerate(stream.entries):
        address = stream.result_slot(entry)
        completion = Completion.unpack(device.memory[address : address + LINE_BYTES].tobytes())
        finished.append(Finished(entry, completion.status, completion.cycles, done[index], completion.result_bytes))
    return StreamRun(tuple(finished), _counters(device), start, device.cycles)


def differences(stream: Stream, device: SimulatedDevice) -> Iterable[str]:
    """What ``device``, having run ``stream``, left in memory otherwise than the functional device does."""
    twin = FunctionalDevice(stream.config)
    load_operands(stream, twin.hdm_write)
    _enable(twin, stream)
    for entry in stream.entries:
        twin.hdm_write(stream.submission_slot(entry), entry.submission_line(FIRST_PASS))
    for queue in stream.rings:
        twin.mmio_write(queue_offset(queue, "DOORBELL"), 1)
    twin.hdm_fence()
    twin.wait(1)
    for entry in stream.entries:
        slot = stream.result_slot(entry)
        ours = Completion.unpack(bytes(device.memory[slot : slot + LINE_BYTES]))
        theirs = Completion.unpack(twin.hdm_read(slot, LINE_BYTES))
        if (ours.status, ours.numeric, ours.result_bytes) != (theirs.status, theirs.numeric, theirs.result_bytes):
            yield (
                f"line {entry.line}: status {Status(ours.status).name}, numeric {ours.numeric}, {ours.result_bytes}"
                f" result bytes; the functional device {Status(theirs.status).name}, {theirs.numeric},"
                f" {theirs.result_bytes}"
            )
        result = slice(slot + RESULT_OFFSET, slot + RESULT_OFFSET + theirs.result_bytes)
        if device.memory[result].tobytes() != twin.hdm_read(result.start, theirs.result_bytes):
            yield f"line {entry.line}: the result's bits differ from the functional device's"
