"""Memory timing of the device from a DRAM standard."""

from __future__ import annotations

from pathlib import Path

from plora.hw.defs.config import NdpConfig
from plora.sim.core.memory import MemoryTiming
from plora.sim.hardware.dram import achieved_gb_per_s, idle_latency_ns, load_standard

FULL_DRAM_CHANNELS, FULL_CHANNELS = 64, 16
"""The paper's device: 64 DRAM channels of 16 bit behind the 16 ports of the full configuration."""

CONTROLLER_NS = 10.0
"""Path through a memory controller and back, in each access. A choice: published controllers take 10 to 30 ns."""


def dram_timing(config: NdpConfig, standard: str = "lpddr5x-8533", path: Path | None = None) -> MemoryTiming:
    """Timing of a device of ``config`` whose ports have the DRAM of the paper's: four channels of ``standard`` each.

    Latency is that of a closed row without queueing, through a controller; a word comes at the rate that streams
    achieve, refresh included, at most one a cycle. A write is acknowledged by the controller.

    Raises:
        UserError: an unknown standard.
    """
    dram = load_standard(standard, path)
    clock_ghz = config.clock_mhz / 1000
    port_gb_per_s = FULL_DRAM_CHANNELS // FULL_CHANNELS * achieved_gb_per_s(dram)
    word_ns = config.stripe_bytes / config.channels / port_gb_per_s
    return MemoryTiming(
        read_latency_cycles=(idle_latency_ns(dram) + CONTROLLER_NS) * clock_ghz,
        write_latency_cycles=CONTROLLER_NS * clock_ghz,
        beat_cycles=max(1.0, word_ns * clock_ghz),
    )
