"""The memory under every buffer: the same in Amaranth's simulator and in the Verilog that is emitted.

The accesses are the whole matrix of reads and writes at one edge: same and other address, after a write
to it at the edge before or not, whole words, some lanes, none.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from plora.hw.build.verilator import build_library
from plora.hw.build.verilog import cached_verilog
from plora.hw.rtl.core.sram import Sram
from tests.hw.rtl.core.bench import refused, simulate

WIDTH, DEPTH, LANE_BITS = 16, 5, 4
LANES = WIDTH // LANE_BITS


class Access(NamedTuple):
    """One clock edge. ``read`` is -1 where nothing is read."""

    read: int
    write: int
    lanes: int
    data: int


def make_sram() -> Sram:
    """The memory of these tests, in one piece."""
    return Sram(width=WIDTH, depth=DEPTH, lane_bits=LANE_BITS)


def make_banked_sram() -> Sram:
    """The same memory of three banks, the last of which is larger than what is left for it."""
    return Sram(width=WIDTH, depth=DEPTH, lane_bits=LANE_BITS, macro_bits=2 * WIDTH)


def accesses(count: int) -> list[Access]:
    """Fills the memory, then reads and writes at random, often at one address and often twice in a row."""
    rng = random.Random(1)
    chosen = [Access(-1, address, (1 << LANES) - 1, rng.getrandbits(WIDTH)) for address in range(DEPTH)]
    address = 0
    while len(chosen) < count:
        address = rng.choice([address, rng.randrange(DEPTH)])
        read = rng.choice([-1, address, address, rng.randrange(DEPTH)])
        lanes = rng.choice([0, rng.getrandbits(LANES), (1 << LANES) - 1])
        chosen.append(Access(read, address, lanes, rng.getrandbits(WIDTH)))
    return chosen


def expected(chosen: list[Access]) -> list[int | None]:
    """What the read port shows after each edge; None before the first read."""
    words, shown, result = [0] * DEPTH, None, []
    for read, write, lanes, data in chosen:
        shown = words[read] if read >= 0 else shown
        mask = sum(((1 << LANE_BITS) - 1) << lane * LANE_BITS for lane in range(LANES) if lanes >> lane & 1)
        words[write] = words[write] & ~mask | data & mask
        result.append(shown)
    return result


def amaranth(chosen: list[Access], make: Callable[[], Sram]) -> list[int]:
    dut, shown = make(), []

    async def bench(ctx: Any) -> None:
        for read, write, lanes, data in chosen:
            ctx.set(dut.read_enable, read >= 0)
            ctx.set(dut.read_address, max(read, 0))
            ctx.set(dut.write_address, write)
            ctx.set(dut.write_enable, lanes)
            ctx.set(dut.write_data, data)
            await ctx.tick()
            shown.append(ctx.get(dut.read_data))

    simulate(dut, bench)
    return shown


def verilator(chosen: list[Access], make: Callable[[], Sram]) -> list[int]:
    verilog = cached_verilog(f"tests.hw.rtl.core.test_sram:{make.__name__}", name="sram_bench")
    assert verilog.count("plora_sram #(") == (1 if make is make_sram else 3) + 1, "instances, and the module itself"
    path = build_library(verilog, top="sram_bench", harness=Path(__file__).resolve().parent / "cpp")
    columns = [np.array(column, np.int32) for column in zip(*chosen, strict=True)]
    shown = np.zeros(len(chosen), np.int32)
    pointers = [column.ctypes.data_as(ctypes.c_void_p) for column in (*columns, shown)]
    ctypes.CDLL(str(path)).sram_run(ctypes.c_int64(len(chosen)), *pointers)
    return [int(word) for word in shown]


@pytest.mark.parametrize("make", [make_sram, make_banked_sram], ids=["one piece", "banks"])
@pytest.mark.parametrize("simulator", [amaranth, verilator], ids=["amaranth", "verilator"])
def test_it_reads_what_was_there_before_the_edge_and_holds_it(
    simulator: Callable[[list[Access], Callable[[], Sram]], list[int]], make: Callable[[], Sram]
) -> None:
    chosen = accesses(400)
    shown = simulator(chosen, make)
    for index, (is_word, wanted) in enumerate(zip(shown, expected(chosen), strict=True)):
        assert wanted is None or is_word == wanted, f"access {index}: {chosen[index - 1 : index + 1]}"


def test_lanes_that_do_not_divide_the_word_and_a_single_word_are_refused() -> None:
    refused("not 10 and 4", lambda: Sram(width=10, depth=4, lane_bits=4))
    refused("depth must be at least 2, not 1", lambda: Sram(width=8, depth=1))
    refused("at least two words of 8 bits, not 15", lambda: Sram(width=8, depth=4, macro_bits=15))
