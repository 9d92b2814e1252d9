"""A synchronous memory with one read and one write port: the only way the core stores whole words."""

from __future__ import annotations

from pathlib import Path

from amaranth.hdl import Array, ClockSignal, Instance, Module, Signal, Value, unsigned
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import EmitPlatform

VERILOG = Path(__file__).resolve().parent.parent / "verilog" / "plora_sram.v"


MACRO_BITS = 8 * 64 * 1024
"""Largest macro. What is larger is made of banks: a macro of 192 KiB would take 0.9 ns of a clock period of 1 ns
(`plora.synth.sram`), one of 64 KiB takes 0.57."""


class Sram(wiring.Component):
    """``depth`` words of ``width`` bits, written in lanes of ``lane_bits``.

    Parameters:
        width: bits of a word, a multiple of ``lane_bits``.
        depth: words, at least 2; any number.
        lane_bits: granularity of writing; by default the whole word.
        macro_bits: a memory of more bits than this is made of banks, each of a power of two of words.

    Ports:
        read_address, read_enable: at a clock edge with ``read_enable`` the addressed word appears on
            ``read_data``, and stays there until the next such edge.
        write_address, write_enable, write_data: lanes whose ``write_enable`` bit is set change at the edge.

    A read of the word that is written at the same edge gives what it held before. Macros may not
    promise that much, so nothing in the core relies on it. Contents at power-up are undefined.

    In Amaranth's simulator a bank is `amaranth.lib.memory`; in emitted Verilog an instance of
    ``plora_sram``, so that megabytes of initial contents are never printed, and so that a memory
    compiler's macro can take its place.
    """

    def __init__(self, *, width: int, depth: int, lane_bits: int | None = None, macro_bits: int = MACRO_BITS) -> None:
        lane_bits = width if lane_bits is None else lane_bits
        if width < 1 or lane_bits < 1 or width % lane_bits:
            raise ValueError(f"width must be a positive multiple of lane_bits, not {width!r} and {lane_bits!r}")
        if depth < 2:
            raise ValueError(f"depth must be at least 2, not {depth!r}")
        if macro_bits < 2 * width:
            raise ValueError(f"macro_bits must be at least two words of {width} bits, not {macro_bits!r}")
        self._width = width
        self._depth = depth
        self._lane_bits = lane_bits
        self._macro_words = macro_bits // width
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
        depth = self._depth
        if depth <= self._macro_words:
            m.d.comb += self.read_data.eq(
                self._bank(
                    m,
                    platform,
                    "macro",
                    depth,
                    self.read_address,
                    self.read_enable,
                    self.write_address,
                    self.write_enable,
                )
            )
            return m
        place_bits = self._macro_words.bit_length() - 1
        bank_words = 1 << place_bits
        banks = -(-depth // bank_words)
        read_place, read_bank = self.read_address[:place_bits], self.read_address[place_bits:]
        write_place, write_bank = self.write_address[:place_bits], self.write_address[place_bits:]
        shown = Signal(range(banks))
        with m.If(self.read_enable):
            m.d.sync += shown.eq(read_bank)
        words = [
            self._bank(
                m,
                platform,
                f"bank_{index}",
                max(2, min(bank_words, depth - index * bank_words)),
                read_place,
                self.read_enable & (read_bank == index),
                write_place,
                self.write_enable & (write_bank == index).replicate(len(self.write_enable)),
            )
            for index in range(banks)
        ]
        m.d.comb += self.read_data.eq(Array(words)[shown])
        return m

    def _bank(
        self,
        m: Module,
        platform: object,
        name: str,
        depth: int,
        read_address: Value,
        read_enable: Value,
        write_address: Value,
        write_enable: Value,
    ) -> Value:
        """Make a memory of ``depth`` words in one piece; return what it shows."""
        address_bits = (depth - 1).bit_length()
        read_address, write_address = read_address[:address_bits], write_address[:address_bits]
        read_data = Signal(self._width, name=f"{name}_data")
        if isinstance(platform, EmitPlatform):
            platform.add_source(VERILOG)
            m.submodules[name] = Instance(
                "plora_sram",
                p_WIDTH=self._width,
                p_DEPTH=depth,
                p_ADDRESS_BITS=address_bits,
                p_LANE_BITS=self._lane_bits,
                i_clk=ClockSignal(),
                i_read_address=read_address,
                i_read_enable=read_enable,
                o_read_data=read_data,
                i_write_address=write_address,
                i_write_enable=write_enable,
                i_write_data=self.write_data,
            )
            return read_data
        m.submodules[name] = words = memory.Memory(shape=unsigned(self._width), depth=depth, init=[])
        read = words.read_port()
        write = words.write_port(granularity=self._lane_bits)
        m.d.comb += [
            read.addr.eq(read_address),
            read.en.eq(read_enable),
            read_data.eq(read.data),
            write.addr.eq(write_address),
            write.en.eq(write_enable),
            write.data.eq(self.write_data),
        ]
        return read_data
