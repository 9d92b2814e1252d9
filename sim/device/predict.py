"""Predicts a descriptor stream: every completion's cycle, as `plora.sw.stream_run` times it on the RTL."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.legality import ChainState, check
from plora.hw.defs.queue import RESULT_OFFSET, operand_offset
from plora.hw.defs.status import Status
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import Demand, demands, shapes_of
from plora.sim.core.memory import Channels, MemoryTiming
from plora.sim.core.pipeline import CorePipeline
from plora.sim.device.engine import Posted, QueueEngine, Ring
from plora.sim.device.stream import Entry, Stream


@dataclass(frozen=True)
class Predicted:
    """What the model says of one descriptor."""

    entry: Entry
    status: Status
    fetched_cycle: float
    cycles: float
    """First to last beat."""
    completed_cycle: float


def statuses(stream: Stream) -> list[Status]:
    """The status of every descriptor, each queue's in its order."""
    chain = dict.fromkeys(stream.rings, ChainState())
    aborted = dict.fromkeys(stream.rings, False)
    first = dict.fromkeys(stream.rings, True)
    found = []
    for entry in stream.entries:
        queue, d = entry.queue, entry.descriptor
        if aborted[queue] and not first[queue]:
            status = Status.CHAIN_ABORTED
        else:
            verdict = check(d, stream.config, stream.window(queue), chain[queue])
            status, chain[queue] = verdict.status, verdict.chain
        first[queue] = not d.chain
        aborted[queue] = bool(d.chain) and status is not Status.OK
        if first[queue]:
            chain[queue] = ChainState()
        found.append(status)
    return found


def stream_demands(stream: Stream, found: Iterable[Status]) -> list[Demand | None]:
    """The demands of every descriptor; None where it is refused."""
    legal = [index for index, status in enumerate(found) if status is Status.OK]
    entries = [stream.entries[index] for index in legal]
    made = demands(
        stream.config,
        shapes_of(
            stream.config,
            (entry.descriptor for entry in entries),
            (stream.submission_slot(entry) + operand_offset(stream.config) for entry in entries),
            (stream.result_slot(entry) + RESULT_OFFSET for entry in entries),
        ),
    )
    result: list[Demand | None] = [None] * len(stream.entries)
    for index, demand in zip(legal, made.rows(), strict=True):
        result[index] = demand
    return result


def new_engine(config: NdpConfig, timing: MemoryTiming) -> QueueEngine:
    """A device without a queue."""
    constants = load_constants()
    channels = Channels(config, timing, constants)
    return QueueEngine(
        config,
        channels,
        CorePipeline(config, channels, constants),
        constants,
        poll_interval_cycles=inf,
        chain_timeout_cycles=inf,
    )


def predict_stream(stream: Stream, timing: MemoryTiming) -> list[Predicted]:
    """Predict ``stream`` on a device whose queues wait with empty rings; cycles count from the start of the run."""
    constants = load_constants()
    engine = new_engine(stream.config, timing)
    for index, ring in stream.rings.items():
        own = Ring(
            index,
            ring.depth,
            submission_line=ring.submission_base // WORD_BYTES,
            submission_lines=(1 << ring.submission_slot_log2) // WORD_BYTES,
            result_line=ring.result_base // WORD_BYTES,
            result_lines=(1 << ring.result_slot_log2) // WORD_BYTES,
        )
        engine.rings[index] = own
        own.look = False
    found = statuses(stream)
    wanted = stream_demands(stream, found)
    posted = [
        Posted(demand, chain=bool(entry.descriptor.chain), published=inf)
        for entry, demand in zip(stream.entries, wanted, strict=True)
    ]
    coming = deque(sorted(range(len(posted)), key=lambda index: stream.entries[index].arrival_cycle))
    host = 0.0
    while coming:
        host = max(host, stream.entries[coming[0]].arrival_cycle)
        engine.advance(host - 1)
        rung = set()
        while coming and stream.entries[coming[0]].arrival_cycle <= host:
            index = coming.popleft()
            posted[index].published = host
            engine.publish(stream.entries[index].queue, posted[index])
            rung.add(stream.entries[index].queue)
        for queue in sorted(rung):
            engine.ring_doorbell(queue, host + constants.doorbell)
            host += constants.register_write
    engine.advance(inf)
    return [
        Predicted(entry, status, p.fetched, p.cycles, p.completed)
        for entry, status, p in zip(stream.entries, found, posted, strict=True)
    ]
