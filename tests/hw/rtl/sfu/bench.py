"""The units of the SFU side by side, each with ports of its own, for the compiled test bench in cpp/."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from amaranth import Module, Signal
from amaranth.hdl import Shape, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import NdpConfig, preset
from plora.hw.rtl.sfu.exp2_fraction import Exp2Fraction
from plora.hw.rtl.sfu.p_scaler import PScaler
from plora.hw.rtl.sfu.row_state import state_layout
from plora.hw.rtl.sfu.sfu import Sfu

TAG_BITS = 8
ROWS = 32

CONFIGS: dict[str, NdpConfig] = {
    "two": replace(preset("full"), name="two channels", channels=2),
    "sixteen": preset("full"),
}


class ReadSfu(wiring.Component):
    """An SFU with plain ports. Rows' states are asked for one at a time, those of odd rows of the second reader."""

    def __init__(self, config: NdpConfig) -> None:
        self.sfu = Sfu(config, tag_bits=TAG_BITS, rows=ROWS)
        members = {name: member for name, member in self.sfu.signature.members.items() if member.is_port}
        super().__init__(
            {
                **{name: (In if member.flow == wiring.In else Out)(member.shape) for name, member in members.items()},
                "read_row": In(range(ROWS)),
                "state": Out(state_layout),
            }
        )
        self._names = {name: member.flow for name, member in members.items()}

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.sfu = sfu = self.sfu
        for name, flow in self._names.items():
            inner, outer = getattr(sfu, name), getattr(self, name)
            m.d.comb += inner.eq(outer) if flow == wiring.In else outer.eq(inner)
        odd = Signal()
        m.d.sync += odd.eq(self.read_row[0])
        m.d.comb += self.state.eq(sfu.reads[0].states[0])
        with m.If(odd):
            m.d.comb += self.state.eq(sfu.reads[1].states[1])
        for read in sfu.reads:
            m.d.comb += [read.pair.eq(self.read_row >> 1), read.enable.eq(1)]
        return m


class SfuBench(wiring.Component):
    """An SFU and a p scaler of each configuration, and an exp2 unit, all from the same clock.

    Port ``PORT`` of unit ``UNIT`` is ``UNIT_PORT``, without structure.
    """

    def __init__(self) -> None:
        self._units: dict[str, Any] = {"exp2": Exp2Fraction()}
        for name, config in CONFIGS.items():
            self._units[f"{name}_sfu"] = ReadSfu(config)
            self._units[f"{name}_scaler"] = PScaler(config)
        super().__init__(
            {
                f"{name}_{port}": (In if member.flow == wiring.In else Out)(Shape.cast(member.shape).width)
                for name, unit in self._units.items()
                for port, member in unit.signature.members.items()
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for name, unit in self._units.items():
            # A module of their own each keeps the emitted text small.
            add_shared(m, platform, name, f"bench_{name}", unit)
            for port, member in unit.signature.members.items():
                inner, outer = Value.cast(getattr(unit, port)), getattr(self, f"{name}_{port}")
                m.d.comb += inner.eq(outer) if member.flow == wiring.In else outer.eq(inner)
        return m
