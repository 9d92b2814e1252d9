"""Ports of the NDP core."""

from __future__ import annotations

from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.interfaces import LineWritePort, ReadPort, completed_layout, fetched_layout

COUNTER_BITS = 32

COUNTERS = ("BEATS", "SPAN", "STALL_WEIGHTS", "STALL_INPUT", "STALL_DRAIN", "WORDS_READ", "WORDS_WRITTEN")
"""Registers of `plora.hw.defs.registers` whose values the core counts."""

counters_layout = data.StructLayout({name.lower(): COUNTER_BITS for name in COUNTERS})
"""Current values; they wrap."""


class NdpCoreSignature(wiring.Signature):
    """Ports of `plora.hw.rtl.core.core.NdpCore`, seen from the core.

    Members:
        fetched: descriptors in the order of execution.
        completed: one record for every descriptor, in the same order.
        read: one port a channel. Operand and weight reads share it; the core keeps them apart.
        write: result lines, one job's after the other's.
        counters: see `COUNTERS`.
        clear_counters: zeroes them.
        idle: nothing is held: no descriptor, no read or write without its answer.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "fetched": In(stream.Signature(fetched_layout(config))),
                "completed": Out(stream.Signature(completed_layout())),
                "read": Out(ReadPort(config)).array(config.channels),
                "write": Out(LineWritePort(config)),
                "counters": Out(counters_layout),
                "clear_counters": In(1),
                "idle": Out(1),
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NdpCoreSignature) and self._config == other._config

    def __repr__(self) -> str:
        return f"NdpCoreSignature({self._config!r})"
