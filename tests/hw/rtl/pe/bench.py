"""The units of the PE array side by side, each with ports of its own, for the compiled test bench in cpp/."""

from __future__ import annotations

from dataclasses import replace

from amaranth import Module
from amaranth.hdl import signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import AccumulatorConfig, NdpConfig, preset
from plora.hw.rtl.interfaces import WORD_BITS
from plora.hw.rtl.pe.align import GridAlign
from plora.hw.rtl.pe.array import PeArray, beat_layout, results_layout
from plora.hw.rtl.pe.converter import WordConverter
from plora.hw.rtl.pe.dot_unit import DotUnit, dot_sum_layout, grid_name
from plora.hw.rtl.pe.drain import OFFSET_BITS, SCALE_BITS, Drain, score_layout
from plora.hw.rtl.pe.product import FP16_BITS, Fp16Product

TAG_BITS = 16

ARRAYS: dict[str, NdpConfig] = {
    "one": replace(preset("tiny"), name="one channel", channels=1),
    "tiny": preset("tiny"),
}


class ProductBench(wiring.Component):
    """A product on its way to the grid, combinational."""

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        super().__init__(
            {
                "a": In(FP16_BITS),
                "b": In(FP16_BITS),
                "enable": In(1),
                "addend": Out(accumulator.product_bits + 1),
                "flags": Out(4),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.product = product = Fp16Product()
        m.submodules.align = align = GridAlign(self._accumulator)
        m.d.comb += [
            product.a.eq(self.a),
            product.b.eq(self.b),
            product.enable.eq(self.enable),
            align.significand.eq(product.significand),
            align.shift.eq(product.shift),
            align.negative.eq(product.negative),
            self.addend.eq(align.addend),
            self.flags[0].eq(product.negative),
            self.flags[1].eq(product.nan),
            self.flags[2].eq(product.infinite),
            self.flags[3].eq(align.clipped),
        ]
        return m


class PeBench(wiring.Component):
    """Dot unit, drain and arrays, all from the same clock."""

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        dot = DotUnit(accumulator).signature.members
        ports = {
            "dot_a": In(dot["a"].shape.size),
            "dot_b": In(dot["b"].shape.size),
            "dot_enable": In(dot["enable"].shape),
            "dot_first": In(1),
            "dot_sum": Out(dot["sum"].shape.size),
            "converter_bf16": In(1),
            "converter_exponent": In(signed(8)),
            "converter_data": In(WORD_BITS),
            "converter_converted": Out(WORD_BITS),
            "drain_sum": In(dot_sum_layout(accumulator).size),
            "drain_offset": In(OFFSET_BITS),
            "drain_bf16": In(1),
            "drain_scale": In(signed(SCALE_BITS)),
            "drain_from_bf16": In(1),
            "drain_value": Out(FP16_BITS),
            "drain_numeric": Out(2),
            "drain_score": Out(score_layout.size),
            "drain_score_numeric": Out(2),
        }
        for name, config in ARRAYS.items():
            ports |= {
                f"{name}_beat": In(beat_layout(config, TAG_BITS).size),
                f"{name}_valid": In(1),
                f"{name}_ready": Out(1),
                f"{name}_result": Out(results_layout(config, TAG_BITS).size),
                f"{name}_result_valid": Out(1),
            }
        super().__init__(ports)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        grid = grid_name(self._accumulator)
        dot = DotUnit(self._accumulator)
        add_shared(m, platform, "dot", f"dot_unit_{grid}", dot)
        m.d.comb += [
            dot.a.as_value().eq(self.dot_a),
            dot.b.as_value().eq(self.dot_b),
            dot.enable.eq(self.dot_enable),
            dot.first.eq(self.dot_first),
            self.dot_sum.eq(dot.sum.as_value()),
        ]
        m.submodules.converter = converter = WordConverter()
        m.d.comb += [
            converter.bf16.eq(self.converter_bf16),
            converter.exponent.eq(self.converter_exponent),
            converter.data.eq(self.converter_data),
            self.converter_converted.eq(converter.converted),
        ]
        drain = Drain(self._accumulator)
        add_shared(m, platform, "drain", f"drain_{grid}", drain)
        m.d.comb += [
            drain.sum.as_value().eq(self.drain_sum),
            drain.offset.eq(self.drain_offset),
            drain.bf16.eq(self.drain_bf16),
            drain.scale.eq(self.drain_scale),
            drain.from_bf16.eq(self.drain_from_bf16),
            self.drain_value.eq(drain.value),
            self.drain_numeric.eq(drain.numeric),
            self.drain_score.eq(drain.score.as_value()),
            self.drain_score_numeric.eq(drain.score_numeric),
        ]
        for name, config in ARRAYS.items():
            m.submodules[name] = array = PeArray(config, tag_bits=TAG_BITS)
            m.d.comb += [
                array.beats.payload.as_value().eq(getattr(self, f"{name}_beat")),
                array.beats.valid.eq(getattr(self, f"{name}_valid")),
                getattr(self, f"{name}_ready").eq(array.beats.ready),
                getattr(self, f"{name}_result").eq(array.results.payload.as_value()),
                getattr(self, f"{name}_result_valid").eq(array.results.valid),
            ]
        return m
