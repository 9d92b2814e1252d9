"""The functional device behind a file that another process maps: for hosts that are not written in Python.

The file holds a page for register accesses, then device memory from `MEMORY_OFFSET` on. A register access
is a mailbox of 32-bit words, little-endian; the host fills the others and then counts ``request`` up, the
device answers by setting ``answered`` to the same number::

    0  request     4  kind (0 read, 1 write, 2 end)     8  offset     12  value     16  answered

Memory is shared as it is. The host stores operands first, then line 0 of a slot with its last four bytes, the valid
word, last.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import LINE_BYTES
from plora.sim.functional.device import FunctionalDevice
from plora.sim.functional.memory import SparseMemory

MEMORY_OFFSET = 4096
READ, WRITE, END = range(3)

_MAILBOX = struct.Struct("<4I")
_ANSWER = struct.Struct("<I")
_VALUE_OFFSET, _ANSWERED_OFFSET = 12, 16
_IDLE_SECONDS = 0.0002


class SharedMemory(SparseMemory):
    """Device memory in a mapped file."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(len(view))
        self._view = view

    def read(self, address: int, size_bytes: int) -> bytes:
        """As `SparseMemory.read`; a line is read until it does not change, so that it is never half of a store."""
        self._check(address, size_bytes)
        data = bytes(self._view[address : address + size_bytes])
        while size_bytes == LINE_BYTES:
            again = bytes(self._view[address : address + size_bytes])
            if again == data:
                break
            data = again
        return data

    def write(self, address: int, data: bytes) -> None:
        """As `SparseMemory.write`; the last four bytes, which may be a valid word, are stored last."""
        self._check(address, len(data))
        end = address + len(data)
        last = max(address, end - 4)
        self._view[address:last] = data[: last - address]
        self._view[last:end] = data[last - address :]


def serve_file(
    path: Path, config: NdpConfig, memory_bytes: int, *, idle_seconds: float, ready: Callable[[], None] = lambda: None
) -> int:
    """Create ``path`` and be the device behind it until a host says END; return the register accesses served.

    Parameters:
        idle_seconds: longest time without an access.
        ready: called once the device answers.

    Raises:
        UserError: the file exists or cannot be made, memory has no proper size, no host came, or somebody cut the file.
    """
    limit = 1 << config.dpa_bits
    if not 0 < memory_bytes <= limit or memory_bytes % config.stripe_bytes:
        raise UserError(
            f"device memory of {memory_bytes} bytes: {config.name!r} takes a multiple of {config.stripe_bytes},"
            f" at most {limit}"
        )
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserError(f"cannot create {path}: {error.strerror}; name a file that does not exist") from None
    try:
        os.ftruncate(handle, MEMORY_OFFSET + memory_bytes)
        with mmap.mmap(handle, MEMORY_OFFSET + memory_bytes) as mapped, memoryview(mapped) as whole:
            with whole[MEMORY_OFFSET:] as view:
                device = FunctionalDevice(config, memory_bytes, memory=SharedMemory(view))
                ready()
                return _answer(device, whole, idle_seconds, lambda: os.fstat(handle).st_size)
    finally:
        # Another device may have the name by now.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(handle)):
                path.unlink()
        os.close(handle)


def _answer(device: FunctionalDevice, page: memoryview, idle_seconds: float, file_bytes: Callable[[], int]) -> int:
    answered, last = 0, time.monotonic()
    request: int
    while True:
        # What a mapping lacks in its file kills whoever touches it.
        if file_bytes() < len(page):
            raise UserError("the device's file was cut short while it was mapped; start the device again")
        request, kind, offset, value = _MAILBOX.unpack_from(page, 0)
        if request == answered:
            if time.monotonic() - last > idle_seconds:
                raise UserError(f"no host accessed a register for {idle_seconds:g} s")
            device.wait(1)
            time.sleep(_IDLE_SECONDS)
            continue
        last = time.monotonic()
        if kind == READ:
            _ANSWER.pack_into(page, _VALUE_OFFSET, device.mmio_read(offset & 0xFFFF))
        elif kind == WRITE:
            device.mmio_write(offset & 0xFFFF, value)
        answered = request
        _ANSWER.pack_into(page, _ANSWERED_OFFSET, answered)
        if kind == END:
            return answered
