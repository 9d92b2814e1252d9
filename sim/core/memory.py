"""The memory channels in time, as the device's AXI ports see them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.errors import UserError
from plora.sim.core.constants import CoreConstants
from plora.sim.core.waits import TABLE, geometric, largest_normal, stream_waits


@dataclass(frozen=True)
class MemoryTiming:
    """How memory answers, in cycles of the device's clock.

    ``stall`` is the probability that a side of a channel is not ready in a cycle, as the RTL's test bench has
    it; ``beat_cycles`` the cycles from one word of a channel to the next, 1 for a memory as fast as the port.
    """

    read_latency_cycles: float = 40
    write_latency_cycles: float = 20
    stall: float = 0.0
    beat_cycles: float = 1.0

    def __post_init__(self) -> None:
        if not (self.read_latency_cycles >= 0 and self.write_latency_cycles >= 0):
            raise UserError(
                f"memory latencies of {self.read_latency_cycles} and {self.write_latency_cycles} cycles:"
                " give at least 0"
            )
        if not 0.0 <= self.stall <= 0.9:
            raise UserError(f"stall is {self.stall}: choose a probability of 0 ... 0.9")
        if not self.beat_cycles >= 1.0:
            raise UserError(
                f"beat_cycles is {self.beat_cycles}: a channel delivers at most a word a cycle, give at least 1"
            )


class Channels:
    """All channels: bursts that read every channel alike, and single lines in between.

    Channels answer reads in the order in which they took them. A burst of the core goes to all of them, and its
    words count when the slowest channel has delivered; a line of the queue engine or of the host holds up its
    own channel by a word, as does a line that is written while the channel streams. ``_lag`` keeps by how much
    a channel is behind the others; idle time makes it up.
    """

    def __init__(self, config: NdpConfig, timing: MemoryTiming, constants: CoreConstants) -> None:
        p = timing.stall
        self._channels = config.channels
        self._read = timing.read_latency_cycles + constants.read_return
        self._write = timing.write_latency_cycles
        self._write_return = constants.write_return
        self._beat = timing.beat_cycles
        self.one = geometric(p)
        """Expected wait for one readiness."""
        self.pair = geometric(p, 2)
        """Expected wait until both of two sides, that need not be ready at once, have been."""
        self._waits: list[float] = stream_waits(p, config.channels).tolist()
        self._mean = p / (1.0 - p)
        self._spread: float = largest_normal(config.channels) * sqrt(p) / (1.0 - p)
        self._free = 0.0
        """Cycle after the last word that the common stream has on the bus."""
        self._lag: dict[int, float] = {}
        self._origin = 0.0
        self._events = 0
        """Words (and the address) since the stream was idle last."""
        self.words_read = 0
        self.words_written = 0

    def _waited(self, events: int) -> float:
        if events <= TABLE:
            return self._waits[events]
        return events * self._mean + self._spread * sqrt(events)

    def read_all(self, request: float, words: int) -> tuple[float, float]:
        """Read ``words`` words of every channel from cycle ``request`` on: cycles of the first and last stripe."""
        self.words_read += words * self._channels
        start = request + self._read
        if start > self._free:
            idle = start - self._free
            self._origin, self._events = start, 1
            self._lag = {c: lag - idle for c, lag in self._lag.items() if lag > idle}
        first_event = self._events
        self._events += words
        beat = self._beat
        first = self._origin + (first_event - 1) * beat + self._waited(first_event + 1)
        last = self._origin + (self._events - 2) * beat + self._waited(self._events)
        self._free = last + beat
        if self._lag:
            lag = max(self._lag.values())
            return first + lag, last + lag
        return first, last

    def read_line(self, channel: int, request: float) -> float:
        """Read one line, asked for in cycle ``request``: cycle in which it arrives."""
        self.words_read += 1
        free = self._free + self._lag.get(channel, 0.0)
        arrival = max(request + self.one + self._read, free) + self.one
        self._lag[channel] = arrival + self._beat - self._free
        return arrival

    def write_line(self, channel: int, offer: float) -> tuple[float, float]:
        """Write one line, offered in cycle ``offer``: cycles in which the port took it, and in which it is in memory.

        Its acknowledgement is on the bus `write_return` cycles after the latter.
        """
        self.words_written += 1
        taken = offer + self.pair
        lag = self._lag.get(channel, 0.0)
        if self._origin <= taken + 1 < self._free + lag:
            self._lag[channel] = lag + self._beat
        return taken, taken + self._write + self.one
