"""What a host does to a device, recorded at its port and played back on another.

A recording holds the calls of `plora.hw.defs.port.DevicePort` in order, waits included, and no answers: played
back, every device is asked the same in the same order, whatever it answers. So one stream of the real driver
can be timed on the RTL and on the model.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.errors import UserError
from plora.hw.defs.port import DevicePort
from plora.hw.defs.queue import LINE_BYTES, Completion, valid_word
from plora.hw.defs.registers import QUEUE_BASE, QUEUE_STRIDE, queue_offset


class Call(NamedTuple):
    """One call: its name, its number (address, offset or cycles), and its bytes, size or value."""

    name: str
    number: int
    data: bytes = b""
    value: int = 0


class RecordingPort:
    """A `DevicePort` that passes everything on to ``inner`` and writes it down in ``calls``."""

    def __init__(self, inner: DevicePort) -> None:
        self.inner = inner
        self.config: NdpConfig = inner.config
        self.calls: list[Call] = []

    def hdm_write(self, address: int, data: bytes) -> None:
        """See `DevicePort`."""
        self.calls.append(Call("hdm_write", address, bytes(data)))
        self.inner.hdm_write(address, data)

    def hdm_read(self, address: int, size_bytes: int) -> bytes:
        """See `DevicePort`."""
        self.calls.append(Call("hdm_read", address, value=size_bytes))
        return self.inner.hdm_read(address, size_bytes)

    def hdm_fence(self) -> None:
        """See `DevicePort`."""
        self.calls.append(Call("hdm_fence", 0))
        self.inner.hdm_fence()

    def mmio_write(self, offset: int, value: int) -> None:
        """See `DevicePort`."""
        self.calls.append(Call("mmio_write", offset, value=value))
        self.inner.mmio_write(offset, value)

    def mmio_read(self, offset: int) -> int:
        """See `DevicePort`."""
        self.calls.append(Call("mmio_read", offset))
        return self.inner.mmio_read(offset)

    def wait(self, cycles: int) -> None:
        """See `DevicePort`."""
        self.calls.append(Call("wait", cycles))
        self.inner.wait(cycles)


def save_calls(calls: Iterable[Call], path: Path) -> None:
    """Write calls as JSON Lines; bytes in base 64."""
    lines = (json.dumps([c.name, c.number, base64.b64encode(c.data).decode(), c.value]) for c in calls)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def load_calls(path: Path) -> list[Call]:
    """Read what `save_calls` wrote.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [Call(name, number, base64.b64decode(data), value) for name, number, data, value in rows]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a recording ({error}); make one with save_calls") from None


class Clocked(DevicePort, Protocol):
    """A device that knows its time, and whose memory may be looked at without taking any."""

    @property
    def cycles(self) -> int:
        """Cycles so far."""
        ...


class SeenCompletion(NamedTuple):
    """A completion line: it came to memory after cycle ``since`` and by cycle ``cycle``.

    These are a cycle apart where it came during a wait, and as far as the host's access took where it came meanwhile.
    """

    queue: int
    number: int
    since: int
    cycle: int
    status: int
    span_cycles: int
    """First to last beat, as the device reports it."""


@dataclass
class Played:
    """A recording played back."""

    call_cycles: list[int]
    """Cycle in which each call returned."""
    completions: list[SeenCompletion]
    """In the order in which they came."""


class _Watch:
    """Follows the rings that the calls set up, and notes every completion line that appears."""

    def __init__(self, config: NdpConfig) -> None:
        self._registers: list[dict[int, int]] = [{} for _ in range(config.queues)]
        self._numbers: dict[int, int] = {}
        self._looked = -1

    def register(self, offset: int, value: int) -> None:
        """Note a register that the host wrote."""
        if offset < QUEUE_BASE:
            return
        queue, own = divmod(offset - QUEUE_BASE, QUEUE_STRIDE)
        if queue >= len(self._registers):
            return
        self._registers[queue][own] = value
        if own == queue_offset(0, "CTRL") - QUEUE_BASE:
            self._numbers.pop(queue, None)
            if value & 1:
                self._numbers[queue] = 0

    def _value(self, queue: int, name: str) -> int:
        return self._registers[queue].get(queue_offset(0, name) - QUEUE_BASE, 0)

    def look(self, peek: Callable[[int, int], bytes], cycle: int) -> Iterable[SeenCompletion]:
        """Give the completion lines that are in memory by ``cycle`` and were not at the last look."""
        for queue, number in list(self._numbers.items()):
            depth = self._value(queue, "DEPTH")
            while depth:
                ring_pass, slot = divmod(number, depth)
                base = self._value(queue, "CQ_BASE_HI") << 32 | self._value(queue, "CQ_BASE_LO")
                address = base + (slot << (self._value(queue, "SLOTS") >> 8 & 31))
                line = peek(address, LINE_BYTES)
                expected = valid_word(self._value(queue, "PASS") + ring_pass)
                if line[-4:] != expected.to_bytes(4, "little"):
                    break
                completion = Completion.unpack(line)
                yield SeenCompletion(queue, number, self._looked, cycle, completion.status, completion.cycles)
                number += 1
                self._numbers[queue] = number
        self._looked = cycle


def play(calls: Iterable[Call], device: Clocked, peek: Callable[[int, int], bytes]) -> Played:
    """Do ``calls`` to ``device`` and time them; ``peek(address, size)`` looks into its memory at once.

    Waits are walked cycle by cycle, so that completions are seen in the cycle in which they come.
    """
    watch = _Watch(device.config)
    played = Played([], [])
    for call in calls:
        if call.name == "wait":
            for _ in range(call.number):
                device.wait(1)
                played.completions += watch.look(peek, device.cycles - 1)
        elif call.name == "hdm_write":
            device.hdm_write(call.number, call.data)
        elif call.name == "hdm_read":
            device.hdm_read(call.number, call.value)
        elif call.name == "hdm_fence":
            device.hdm_fence()
        elif call.name == "mmio_write":
            device.mmio_write(call.number, call.value)
            watch.register(call.number, call.value)
        elif call.name == "mmio_read":
            device.mmio_read(call.number)
        else:
            raise UserError(f"a recording has no call {call.name!r}; make it anew")
        played.completions += watch.look(peek, device.cycles - 1)
        played.call_cycles.append(device.cycles)
    return played
