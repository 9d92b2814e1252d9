"""A synchronous memory with one read and one write port: the only way the core stores whole words."""

from __future__ import annotations

from pathlib import Path

from amaranth.hdl import ClockSignal, Instance, Module, unsigned
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import EmitPlatform

VERILOG = Path(__file__).resolve().parent.parent / "verilog" / "plora_sram.v"


class Sram(wiring.Component):
    """``depth`` words of ``width`` bits, written in lanes of ``lane_bits``.

    Parameters:
        width: bits of a word, a multiple of ``lane_bits``.
        depth: words, at least 2; any number.
        lane_bits: granularity of writing; by default the whole word.

    Ports:
        read_address, read_enable: at a clock edge with ``read_enable`` the addressed word appears on
            ``read_data``, and stays there until the next such edge.
        write_address, write_enable, write_data: lanes whose ``write_enable`` bit is set change at the edge.

    A read of the word that is written at the same edge gives what it held before. Macros may not
    promise that much, so nothing in the core relies on it. Contents at power-up are undefined.

    In Amaranth's simulator this is `amaranth.lib.memory`; in emitted Verilog an instance of
    ``plora_sram``, so that megabytes of initial contents are never printed, and so that a memory
    compiler's macro can take its place.
    """

    def __init__(self, *, width: int, depth: int, lane_bits: int | None = None) -> None:
        lane_bits = width if lane_bits is None else lane_bits
        if width < 1 or lane_bits < 1 or width % lane_bits:
            raise ValueError(f"width must be a positive multiple of lane_bits, not {width!r} and {lane_bits!r}")
        if depth < 2:
            raise ValueError(f"depth must be at least 2, not {depth!r}")
        self._width = width
        self._depth = depth
        self._lane_bits = lane_bits
        super().__init__(
            {
                "read_address": In(range(depth)),
                "read_enable": In(1),
                "read_data": Out(width),
                "write_address": In(range(depth)),
                "write_enable": In(width // lane_bits),
                "write_data": In(width),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        if isinstance(platform, EmitPlatform):
            platform.add_source(VERILOG)
            m.submodules.macro = Instance(
                "plora_sram",
                p_WIDTH=self._width,
                p_DEPTH=self._depth,
                p_ADDRESS_BITS=(self._depth - 1).bit_length(),
                p_LANE_BITS=self._lane_bits,
                i_clk=ClockSignal(),
                i_read_address=self.read_address,
                i_read_enable=self.read_enable,
                o_read_data=self.read_data,
                i_write_address=self.write_address,
                i_write_enable=self.write_enable,
                i_write_data=self.write_data,
            )
            return m
        m.submodules.words = words = memory.Memory(shape=unsigned(self._width), depth=self._depth, init=[])
        read = words.read_port()
        write = words.write_port(granularity=self._lane_bits)
        m.d.comb += [
            read.addr.eq(self.read_address),
            read.en.eq(self.read_enable),
            self.read_data.eq(read.data),
            write.addr.eq(self.write_address),
            write.en.eq(self.write_enable),
            write.data.eq(self.write_data),
        ]
        return m
