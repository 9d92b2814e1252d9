"""How the memory behind the device's channels answers."""

from __future__ import annotations

from dataclasses import dataclass

from plora.hw.defs.errors import UserError


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
