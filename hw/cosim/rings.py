"""Many descriptors through many rings, driven in C++: millions where the host driver makes thousands."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plora.hw.cosim.device import RtlDevice
from plora.hw.cosim.library import Poke, Ring
from plora.hw.defs.legality import RingSetup
from plora.hw.defs.queue import valid_word
from plora.hw.defs.registers import queue_offset

PACKED_BYTES = 32
"""Bytes of a descriptor in an array: its own, and zeros."""


@dataclass
class RingLoad:
    """Descriptors for one queue, and what became of them."""

    queue: int
    setup: RingSetup
    first_pass: int
    descriptors: npt.NDArray[np.uint8]
    """(count, `PACKED_BYTES`)."""
    statuses: npt.NDArray[np.uint8] | None = None
    """(count,), after `drive_rings`."""
    longest_wait_cycles: int = 0
    """From the landing of a descriptor to its completion line."""


def enable(device: RtlDevice, load: RingLoad, *, pasid: int = 1, weight: int = 1) -> bool:
    """Write the registers of the load's queue and enable it; return whether the device did."""
    setup = load.setup
    values = {"PASID": pasid, "DEPTH": setup.depth, "PASS": load.first_pass, "WEIGHT": weight}
    values["SLOTS"] = setup.submission_slot_log2 | setup.result_slot_log2 << 8
    wide = {
        "BASE": setup.base,
        "LIMIT": setup.limit,
        "SQ_BASE": setup.submission_base,
        "CQ_BASE": setup.result_base,
    }
    for name, value in wide.items():
        values |= {f"{name}_LO": value & 0xFFFF_FFFF, f"{name}_HI": value >> 32}
    for name, value in values.items():
        device.mmio_write(queue_offset(load.queue, name), value)
    device.mmio_write(queue_offset(load.queue, "CTRL"), 1)
    return bool(device.mmio_read(queue_offset(load.queue, "QSTATUS")) & 1)


def disable(device: RtlDevice, queue: int) -> None:
    """Disable a queue and wait until it is idle."""
    device.mmio_write(queue_offset(queue, "CTRL"), 0)
    while device.mmio_read(queue_offset(queue, "QSTATUS")):
        device.wait(20)


def drive_rings(
    device: RtlDevice, loads: Sequence[RingLoad], *, pokes: Sequence[tuple[int, int]] = (), seed: int = 1
) -> None:
    """Put the descriptors of ``loads`` through their queues, which are enabled, and fill in what became of them.

    Parameters:
        pokes: register writes (offset, value) made in between, at random moments and in this order.
        seed: of the moments.

    Raises:
        RtlError: a rule was broken, a completion is not that of its descriptor, or none came within the device's
            ``timeout_cycles``.
    """
    rings = (Ring * len(loads))()
    for ring, load in zip(rings, loads, strict=True):
        count = len(load.descriptors)
        load.statuses = np.full(count, 0xFF, np.uint8)
        load.descriptors = np.ascontiguousarray(load.descriptors)
        assert load.descriptors.dtype == np.uint8 and load.descriptors.shape == (count, PACKED_BYTES)
        ring.submission_base, ring.result_base = load.setup.submission_base, load.setup.result_base
        ring.queue, ring.depth = load.queue, load.setup.depth
        ring.submission_log2, ring.result_log2 = load.setup.submission_slot_log2, load.setup.result_slot_log2
        ring.valid = valid_word(load.first_pass)
        ring.doorbell, ring.head = queue_offset(load.queue, "DOORBELL"), queue_offset(load.queue, "CQ_HEAD")
        ring.count, ring.descriptors, ring.statuses = count, load.descriptors.ctypes.data, load.statuses.ctypes.data
    writes = (Poke * len(pokes))(*(Poke(*poke) for poke in pokes))
    device.call("ndp_drive_rings", rings, ctypes.c_uint64(len(loads)), writes, len(pokes), seed)
    for ring, load in zip(rings, loads, strict=True):
        load.longest_wait_cycles = ring.longest_wait_cycles
