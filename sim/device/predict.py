"""Predicts a descriptor stream: every completion's cycle, as `plora.sw.stream_run` times it on the RTL."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from plora.hw.defs.config import WORD_BYTES
from plora.hw.defs.legality import ChainState, RingSetup, check
from plora.hw.defs.queue import RESULT_OFFSET, operand_offset
from plora.hw.defs.status import Status
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import Demand, Demands, demands, shapes_of
from plora.sim.core.memory import MemoryTiming
from plora.sim.core.waits import geometric
from plora.sim.device.kernel import NEVER, DeviceKernel, RingPlace
from plora.sim.device.stream import Entry, Stream

_START = 1_000_000.0
"""Cycle of the model's clock at which a run starts: long after the queues were found empty."""


@dataclass(frozen=True)
class Predicted:
    """What the model says of one descriptor. Cycles count from the start of the run."""

    entry: Entry
    status: Status
    fetched_cycle: float
    """The core took it."""
    cycles: float
    """First to last beat; 0 if it was refused."""
    completed_cycle: float
    """Its completion line was in memory."""


def statuses(stream: Stream) -> list[Status]:
    """The status of every descriptor, each queue's in its order."""
    chain = dict.fromkeys(stream.rings, ChainState())
    aborted = dict.fromkeys(stream.rings, False)
    found = []
    for entry in stream.entries:
        queue, d = entry.queue, entry.descriptor
        if aborted[queue]:
            status = Status.CHAIN_ABORTED
        else:
            verdict = check(d, stream.config, stream.rings[queue].window, chain[queue], entry.softmax_scale)
            status, chain[queue] = verdict.status, verdict.chain
        aborted[queue] = bool(d.chain) and status is not Status.OK
        if not d.chain:
            chain[queue] = ChainState()
        found.append(status)
    return found


def stream_demands(stream: Stream, found: Iterable[Status]) -> Demands:
    """The demands of the legal descriptors, in order."""
    entries = [entry for entry, status in zip(stream.entries, found, strict=True) if status is Status.OK]
    return demands(
        stream.config,
        shapes_of(
            stream.config,
            (entry.descriptor for entry in entries),
            (stream.submission_slot(entry) + operand_offset(stream.config) for entry in entries),
            (stream.result_slot(entry) + RESULT_OFFSET for entry in entries),
        ),
    )


def ring_place(ring: RingSetup, *, weight: int = 1, interrupts: bool = False) -> RingPlace:
    """A queue's registers as the walk wants them."""
    return RingPlace(
        depth=ring.depth,
        submission_line=ring.submission_base // WORD_BYTES,
        submission_lines=(1 << ring.submission_slot_log2) // WORD_BYTES,
        result_line=ring.result_base // WORD_BYTES,
        result_lines=(1 << ring.result_slot_log2) // WORD_BYTES,
        weight=weight,
        interrupts=interrupts,
    )


def predict_stream(stream: Stream, timing: MemoryTiming) -> list[Predicted]:
    """Predict ``stream`` on a device whose queues wait with empty rings; the host takes completions at once.

    Raises:
        UserError: there is no C++ compiler.
    """
    constants = load_constants()
    kernel = DeviceKernel(stream.config, timing, poll_interval_cycles=NEVER, chain_timeout_cycles=NEVER)
    counts = Counter(entry.queue for entry in stream.entries)
    for index, ring in stream.rings.items():
        # A host that takes completions at once never lets a ring fill up: to the device it is endless.
        kernel.enable(index, replace(ring_place(ring), depth=max(ring.depth, counts[index])), 0)
    kernel.advance(_START)

    found = statuses(stream)
    legal = iter(stream_demands(stream, found).rows())
    nothing = Demand._make([0] * len(Demand._fields))
    rows = [next(legal) if status is Status.OK else None for status in found]
    answer, address_and_data = geometric(timing.stall), geometric(timing.stall, 2)
    coming = deque(sorted(range(len(rows)), key=lambda index: stream.entries[index].arrival_cycle))
    host = 0.0
    while coming:
        host = max(host, stream.entries[coming[0]].arrival_cycle)
        kernel.advance(_START + host - 1)
        rung = set()
        while coming and stream.entries[coming[0]].arrival_cycle <= host:
            index = coming.popleft()
            entry, row = stream.entries[index], rows[index]
            kernel.publish(
                entry.queue,
                entry.slot,
                [row or nothing],
                published=_START + host,
                tag=index,
                chain=[bool(entry.descriptor.chain)],
                refused=[row is None],
            )
            rung.add(entry.queue)
        for queue in sorted(rung):
            # Address and data of a register write stall as memory does; so does its answer.
            host += address_and_data
            kernel.ring_doorbell(queue, _START + host + constants.doorbell)
            host += constants.register_write + answer
    kernel.advance(NEVER)
    done = kernel.completions()
    done = done[np.argsort(done["tag"])]
    ran = np.isfinite(done["first_beat"])
    cycles = np.zeros(len(done))
    cycles[ran] = done["last_beat"][ran] - done["first_beat"][ran] + 1
    return [
        Predicted(entry, status, fetched - _START, beats, completed - _START)
        for entry, status, fetched, beats, completed in zip(
            stream.entries, found, done["fetched"].tolist(), cycles.tolist(), done["completed"].tolist(), strict=True
        )
    ]
