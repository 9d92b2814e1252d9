"""A process's hold on a device: driver, memory and one queue, set up in one call."""

from __future__ import annotations

from dataclasses import dataclass

from plora.hw.defs.errors import UserError
from plora.hw.defs.port import DevicePort
from plora.hw.defs.queue import MAX_DEPTH, MAX_SLOT_LOG2, MIN_DEPTH, MIN_SLOT_LOG2
from plora.sw.driver import Driver
from plora.sw.interrupts import Interrupts, Notice, TakeMessages
from plora.sw.memory import HdmAllocator
from plora.sw.queue_pair import QueuePair, RingPlace
from plora.sw.tiling import SlotSizes, full_slots


@dataclass(frozen=True)
class Session:
    """What a process holds of a device. Made by `open_session`."""

    driver: Driver
    allocator: HdmAllocator
    """The rest of the process's window."""
    queue: QueuePair


def open_session(
    port: DevicePort,
    *,
    memory_bytes: int,
    base: int = 0,
    queue: int = 0,
    pasid: int = 1,
    depth: int = 32,
    slots: SlotSizes | None = None,
    weight: int = 1,
    take_interrupts: TakeMessages | None = None,
    timeout_cycles: int = 4_000_000,
) -> Session:
    """Find the device behind ``port``, place rings in memory and enable a queue.

    Parameters:
        memory_bytes: size of the window that the process gets.
        base: first DPA of the window, a multiple of the stripe size.
        queue, pasid: queue of the device, and the process it is bound to.
        depth: slots of each ring.
        slots: sizes of the slots (default: as large as the device's buffers can use).
        weight: descriptors that the device may serve of this queue in one turn.
        take_interrupts: where the device's messages arrive: the queue then tells of each completion with the vector
            of its own number. None: the host polls.
        timeout_cycles: longest wait for one completion.

    Raises:
        UserError: a value is out of range, or the rings do not fit the window.
        DeviceError: there is no such device, or it refuses the set-up.
    """
    driver = Driver(port)
    if not MIN_DEPTH <= depth <= MAX_DEPTH:
        raise UserError(f"ring depth is {depth}: choose {MIN_DEPTH} ... {MAX_DEPTH}")
    sizes = slots or full_slots(driver.config)
    for ring, log2 in (("submission", sizes.submission_log2), ("result", sizes.result_log2)):
        if not MIN_SLOT_LOG2 <= log2 <= MAX_SLOT_LOG2:
            raise UserError(f"log2 of a {ring} slot's bytes is {log2}: choose {MIN_SLOT_LOG2} ... {MAX_SLOT_LOG2}")
    allocator = HdmAllocator(base, base + memory_bytes, driver.config.stripe_bytes)
    submission = allocator.allocate(depth * sizes.submission_bytes, "submission ring")
    result = allocator.allocate(depth * sizes.result_bytes, "completion ring")
    place = RingPlace(
        window_base=base,
        window_limit=base + memory_bytes,
        submission_base=submission.address,
        result_base=result.address,
        depth=depth,
        submission_slot_log2=sizes.submission_log2,
        result_slot_log2=sizes.result_log2,
    )
    notice = None if take_interrupts is None else Notice(Interrupts(driver, take_interrupts), queue)
    pair = QueuePair(
        driver, queue, pasid=pasid, place=place, weight=weight, notice=notice, timeout_cycles=timeout_cycles
    )
    return Session(driver, allocator, pair)
