"""Times of descriptors in closed form: alone in an idle core, and what each adds to a long stream.

Whole arrays of descriptors at once, for millions of them. `plora.sim.device.kernel` follows every burst
instead and is what the RTL is compared with; this agrees with it to the cycle for a descriptor alone
(tests/sim/core/test_closed.py says where), and says for streams which resource they are bound by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import NdpConfig
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import TO_ACCUMULATORS, TO_MEMORY, Demands, Ints
from plora.sim.core.memory import MemoryTiming
from plora.sim.core.waits import TABLE, geometric, largest_normal, stream_waits

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Alone:
    """A descriptor that an idle core takes in cycle 0; arrays of equal length.

    ``given``: it leaves the decoder. ``first_beat``, ``last_beat``: of the array. ``completed``: offered to the
    queue engine.
    """

    given: Floats
    first_beat: Floats
    last_beat: Floats
    completed: Floats

    @property
    def cycles(self) -> Floats:
        """First to last beat, as the device reports it."""
        return self.last_beat - self.first_beat + 1


def _waited(timing: MemoryTiming, channels: int, events: Ints) -> Floats:
    """Expected wait of the slowest channel in so many events."""
    p = timing.stall
    if p == 0.0:
        return np.zeros(len(events))
    table = stream_waits(p, channels)
    beyond = events * p / (1 - p) + largest_normal(channels) * np.sqrt(events * p) / (1 - p)
    return np.where(events <= TABLE, table[np.minimum(events, TABLE)], beyond)


def _longest_burst(config: NdpConfig) -> int:
    c = load_constants()
    return min(c.page_words, config.dram_buffer_stripes // c.burst_share)


def _slack(config: NdpConfig, timing: MemoryTiming) -> float:
    """Cycles that each stripe of a long stream waits because the DRAM buffer's room comes round too late."""
    c, longest = load_constants(), _longest_burst(config)
    turn = timing.read_latency_cycles + c.read_return + c.rendezvous + c.burst_request + 2 + longest
    return max(turn / _in_flight(config) - timing.beat_cycles, 0.0)


def _in_flight(config: NdpConfig) -> int:
    """Stripes that may be asked for and not yet used."""
    return min(config.dram_buffer_stripes, load_constants().bursts_in_flight * _longest_burst(config))


def hides_latency(config: NdpConfig, timing: MemoryTiming) -> bool:
    """Whether the DRAM buffer is deep enough for a stream of any length at the speed of memory."""
    return _slack(config, timing) == 0.0


def pass_cycles(demands: Demands) -> Ints:
    """Cycles from one pass over a row group to the next where weights are there."""
    drains = demands.destination != TO_ACCUMULATORS
    return np.maximum(
        np.maximum(demands.group_cycles, demands.beat_cycles), np.where(drains, 1 + demands.merge_cycles, 1)
    )


def _through(demands: Demands, passes: Ints, period: Ints) -> Ints:
    """Cycles from the first beat to the last of so many passes where weights are there.

    A pass whose end has to wait for its drain holds up the beat two behind it.
    """
    beats = demands.group_cycles
    single = np.where(passes == 1, 0, np.where(passes == 2, 1, demands.beat_cycles + 1 + (passes - 3) * period))
    several = np.where(passes == 1, beats - 1, 2 * beats - 1 + (passes - 2) * period)
    return np.where(period > beats, np.where(beats == 1, single, several), passes * beats - 1)


def alone(config: NdpConfig, demands: Demands, timing: MemoryTiming) -> Alone:
    """Times of descriptors, each alone. Kept and shared operands are taken to be there.

    Read the steps as: operand and weights are asked for, words arrive one a cycle, beats follow their stripes as
    fast as passes and drains allow, results are rounded, collected, written and acknowledged.
    """
    c, d = load_constants(), demands
    given = np.full(len(d), float(c.instruction_buffer + c.decode))
    # Broadcast, channel queue, and the way to memory and back; weights are asked for a cycle later.
    asked = given + c.burst_cut + 1 + c.burst_request
    word = asked + timing.read_latency_cycles + c.read_return
    longest = _longest_burst(config)
    first_weights = np.minimum(np.minimum(longest, c.page_words - d.device_stripe % c.page_words), d.stripes)
    first_operand = np.minimum(c.page_words - d.operand_stripe % c.page_words, d.operand_stripes)
    # Bursts of operand and weights take turns: all but the last of the operand's have weights before them.
    operand_bursts = np.where(d.load, -(-(d.operand_stripe % c.page_words + d.operand_stripes) // c.page_words), 0)
    between = np.minimum(first_weights + np.maximum(operand_bursts - 2, 0) * longest, d.stripes)
    before_operand_end = d.operand_stripes + np.where(operand_bursts > 1, between, 0)
    before_weights = np.where(d.load, first_operand, c.queue)
    all_words = np.where(d.load, d.operand_stripes, c.queue) + d.stripes

    def arrival(words: Ints) -> Floats:
        return word + (words - 1) * timing.beat_cycles + _waited(timing, config.channels, words + 1) + c.rendezvous

    operand_there = np.where(d.load, arrival(before_operand_end), 0.0)
    granted = np.maximum(given + c.queue, operand_there)
    first_beat = np.maximum(granted + c.grant, arrival(before_weights + 1))

    passes, period = d.groups * d.pairs, pass_cycles(d)
    # Scales of keys have a cycle of their own between the passes.
    of_keys = np.where(d.group_stripes > 0, 0, d.frames)
    by_array = first_beat + _through(d, passes, period) + of_keys
    # What the last group's stripe is waited for, its passes follow. A stream longer than the DRAM buffer cannot be
    # faster than the buffer's room comes round.
    slow = _slack(config, timing) * np.maximum(d.stripes - _in_flight(config), 0)
    by_memory = arrival(all_words) + slow + _through(d, d.pairs, period) - (d.group_cycles - 1)
    by_memory += np.minimum(1 << d.expansion_log2, d.beats) - 1
    last_beat = np.maximum(by_array, by_memory)
    held_up = period > d.group_cycles
    accepted = np.maximum(
        first_beat + np.where(held_up, d.group_cycles - 1 + 2 + d.beat_cycles - 1 + (passes - 1) * period, 0),
        last_beat + 2 + d.beat_cycles - 1,
    )
    results = accepted + c.array + d.merge_cycles + d.softmax_cycles + c.collect + c.queue
    ready = np.where(d.destination == TO_ACCUMULATORS, last_beat + c.queue, results)
    one, pair = geometric(timing.stall), geometric(timing.stall, 2)
    sent = ready + c.write_start + d.lines * (1 + pair) - 1
    acknowledged = sent + c.line_queue + timing.write_latency_cycles + one + c.write_return
    passed = np.where(d.destination == TO_MEMORY, sent + 1, ready)
    completed = passed + c.retire
    completed = np.where(d.destination == TO_MEMORY, np.maximum(completed, acknowledged + c.write_end), completed)
    return Alone(given, first_beat, last_beat, completed)


BOUNDS = ("memory", "array", "decoder", "queue engine", "results", "latency")
"""What a descriptor in a long stream can be bound by, in the order of `Interval.by`."""


@dataclass(frozen=True)
class Interval:
    """What descriptors add to a long stream of independent ones; ``by`` has a row for each of `BOUNDS`."""

    by: Floats

    @property
    def cycles(self) -> Floats:
        """From one completion to the next, where all resources but the slowest keep up."""
        return np.asarray(self.by.max(axis=0))

    @property
    def bound(self) -> Ints:
        """Index in `BOUNDS` of the slowest."""
        return np.asarray(self.by.argmax(axis=0))


_ENGINE_JOBS = 4
"""Of the queue engine for each descriptor: issue, inspect, complete, retire."""


def interval(config: NdpConfig, demands: Demands, timing: MemoryTiming) -> Interval:
    """Cycles that each resource needs for a descriptor.

    memory: words of the busiest channel, its slot, its completion and its share of result lines included; array:
    beats, and the cycle between jobs; results: while the lines of one are sent, those of one other may wait for
    their acknowledgements; latency: as many jobs as there are slots, from decoder to last beat.
    """
    c, d = load_constants(), demands
    own_lines = 2 + -(-d.lines // config.channels)
    ready = 1 / (1 - timing.stall)
    memory = (d.stripes + d.operand_stripes + own_lines) * timing.beat_cycles * ready
    array = (d.groups * d.pairs * pass_cycles(d) + np.where(d.group_stripes > 0, 0, d.frames) + 1).astype(np.float64)
    one, pair = geometric(timing.stall), geometric(timing.stall, 2)
    taken = c.engine_job - 1  # from offered to taken by the queue engine
    sending = 1 + c.write_start + d.lines * (1 + pair)
    acknowledged = sending + c.line_queue + timing.write_latency_cycles + one + c.write_return + c.write_end + taken
    results = np.where(d.destination == TO_MEMORY, np.maximum(sending, acknowledged / 2), float(c.retire + taken))
    times = alone(config, demands, timing)
    latency = (times.last_beat - times.given + 1) / c.job_slots
    same = np.ones(len(d))
    return Interval(
        np.stack([memory, array, same * (c.decode + 1), same * _ENGINE_JOBS * c.engine_job, results, latency])
    )
