"""The compiled benches (bench.py behind the C++ in cpp/) as numpy functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.build.verilator import build_library
from plora.hw.build.verilog import cached_verilog
from plora.hw.defs.config import WORD_VALUES, AccumulatorConfig
from plora.hw.rtl.pe.dot_unit import DotUnit, dot_sum_layout, grid_name, segment_starts
from plora.hw.rtl.pe.drain import Drain

Array = npt.NDArray[Any]
ACCUMULATOR = AccumulatorConfig()
CPP = Path(__file__).resolve().parent / "cpp"
SUM_WORDS = -(-dot_sum_layout(ACCUMULATOR).size // 32)
TO_BF16, FROM_BF16 = 1, 2
STICKY = ("nan", "positive_infinity", "negative_infinity", "clipped")


def build_units() -> Path:
    """Return the path of the library of `Units`, built where its sources changed."""
    verilog = cached_verilog("tests.hw.rtl.pe.bench:PeBench", ACCUMULATOR, name="pe_bench")
    # Compiled once instead of once for each of its thirteen uses.
    verilog = f'`verilator_config\nno_inline -module "dot_unit_{grid_name(ACCUMULATOR)}"\n`verilog\n{verilog}'
    return build_library(verilog, top="pe_bench", harness=CPP / "units")


def build_product() -> Path:
    """Return the path of the library of `Product`, built where its sources changed."""
    verilog = cached_verilog("tests.hw.rtl.pe.bench:ProductBench", ACCUMULATOR, name="product_bench")
    return build_library(verilog, top="product_bench", harness=CPP / "product")


@dataclass(frozen=True)
class ArrayRun:
    """What an array did with a list of beats; bits as Python integers."""

    accepted: list[int]
    """Cycle in which each beat was accepted."""
    results: list[int]
    result_cycles: list[int]


class Drained(NamedTuple):
    """What the drain made of sums: FP16 bits, scores as bits of `score_layout`, and the numeric flags of both."""

    values: Array
    numeric: Array
    scores: Array
    score_numeric: Array


def sum_bits(value: int, carries: int = 0, sticky: int = 0) -> int:
    """Return a `dot_sum_layout` as an integer."""
    bits = ACCUMULATOR.bits
    return value % (1 << bits) | carries << bits | sticky << bits + len(segment_starts(ACCUMULATOR)) - 1


def sum_words(sums: Sequence[int]) -> Array:
    """Return `dot_sum_layout` integers as rows of 32-bit words."""
    return np.frombuffer(b"".join(word.to_bytes(4 * SUM_WORDS, "little") for word in sums), np.uint32).reshape(
        -1, SUM_WORDS
    )


def sum_value(word: int) -> int:
    """Return the number of grid steps in a `dot_sum_layout`."""
    bits, starts = ACCUMULATOR.bits, segment_starts(ACCUMULATOR)[1:]
    total = word + sum((word >> bits + i & 1) << start for i, start in enumerate(starts))
    total %= 1 << bits
    return total - (total >> bits - 1 << bits)


def sum_sticky(word: int) -> tuple[bool, ...]:
    """Return the sticky flags of a `dot_sum_layout`, in the order of `STICKY`."""
    first = ACCUMULATOR.bits + len(segment_starts(ACCUMULATOR)) - 1
    return tuple(bool(word >> first + i & 1) for i in range(len(STICKY)))


class Compiled:
    """An instance of a design behind C functions whose names begin with ``prefix``."""

    def __init__(self, library: Path, prefix: str) -> None:
        self._library, self._prefix = ctypes.CDLL(str(library)), prefix
        open_design = getattr(self._library, f"{prefix}_open")
        open_design.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(open_design())

    def close(self) -> None:
        """End the simulation."""
        getattr(self._library, f"{self._prefix}_close")(self._handle)

    def _call(self, function: str, *arguments: Array | int) -> int:
        converted = [
            argument.ctypes.data_as(ctypes.c_void_p) if isinstance(argument, np.ndarray) else ctypes.c_int64(argument)
            for argument in arguments
        ]
        called = getattr(self._library, f"{self._prefix}_{function}")
        called.restype = ctypes.c_int64
        return int(called(self._handle, *converted))


class Product(Compiled):
    """Products on the grid, see cpp/product."""

    def __init__(self, library: Path) -> None:
        super().__init__(library, "product")

    def some(self, a: Array, b: Array, enable: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return steps, negative, nan, infinite and clipped of products of FP16 bit patterns."""
        a, b = (np.ascontiguousarray(operand, np.uint16) for operand in (a, b))
        enable = np.ascontiguousarray(enable, np.uint8)
        addend, flags = np.empty(a.size, np.uint64), np.empty(a.size, np.uint8)
        self._call("some", a.size, a, b, enable, addend, flags)
        negative, nan, infinite, clipped = (flags >> bit & 1 != 0 for bit in range(4))
        steps = addend.astype(np.int64) + negative - (1 << ACCUMULATOR.product_bits)
        return steps, negative, nan, infinite, clipped

    def all(self, first: int, end: int) -> tuple[int, int]:
        """Return the number of wrong products of ``first <= a < end`` with every b, and a << 16 | b of one."""
        wrong = np.zeros(1, np.uint32)
        count = self._call("all", first, end, ACCUMULATOR.lsb_exponent, ACCUMULATOR.product_bits, wrong)
        return count, int(wrong[0])


class Units(Compiled):
    """Dot unit, drain and arrays, see cpp/units."""

    def __init__(self, library: Path) -> None:
        super().__init__(library, "pe")

    def dot(self, a: Array, b: Array, enable: Array, first: Array) -> list[int]:
        """Return the accumulator after every row of operands (n, 16)."""
        a, b = (np.ascontiguousarray(operand, np.uint16) for operand in (a, b))
        masks = np.packbits(enable, axis=1, bitorder="little").view(np.uint16)
        first = np.ascontiguousarray(first, np.uint8)
        sums = np.empty((len(a), SUM_WORDS), np.uint32)
        self._call("dot", len(a), DotUnit.LATENCY, a, b, np.ascontiguousarray(masks), first, sums)
        return [int.from_bytes(row.tobytes(), "little") for row in sums]

    def drain(
        self, words: Array, offsets: Array | int = 0, formats: Array | int = 0, scales: Array | int = 0
    ) -> Drained:
        """Drain sums, rows of `sum_words`, each times ``2**-offset`` (BF16: ``2**(-offset - scale)``).

        ``formats``: `TO_BF16`, `FROM_BF16` or both.
        """
        count = len(words)
        settings = (
            np.ascontiguousarray(np.broadcast_to(value, count), dtype)
            for value, dtype in ((offsets, np.uint8), (formats, np.uint8), (scales, np.int16))
        )
        drained = Drained(*(np.empty(count, dtype) for dtype in (np.uint16, np.uint8, np.uint32, np.uint8)))
        self._call("drain", count, Drain.LATENCY, words, *settings, *drained)
        return drained

    def convert(self, values: Array, exponent: int, *, bf16: bool = True) -> Array:
        """Return BF16 patterns (whole words) times ``2**exponent`` as FP16 patterns."""
        data = np.ascontiguousarray(values, np.uint16)
        converted = np.empty_like(data)
        self._call("convert", data.size // WORD_VALUES, int(bf16), exponent, data, converted)
        return converted

    def array(self, name: str, beats: Sequence[int], gaps: Sequence[int], sizes: tuple[int, int]) -> ArrayRun:
        """Offer ``beats`` to the array ``name``, each after a gap of cycles in which the payload is noise.

        ``sizes`` are those of a beat and of a result, in bits.
        """
        beat_bytes, result_bytes = (8 if size <= 64 else 4 * -(-size // 32) for size in sizes)
        payloads = np.frombuffer(b"".join(beat.to_bytes(beat_bytes, "little") for beat in beats), np.uint32)
        room = 4 * len(beats) + 16
        accepted, cycles = np.empty(len(beats), np.int64), np.empty(room, np.int64)
        results = np.empty((room, result_bytes), np.uint8)
        count = self._call(
            f"array_{name}",
            *(len(beats), payloads, np.array(gaps, np.int32), 32),
            *(accepted, room, results, cycles),
        )
        assert 0 <= count <= room, "a beat was never accepted" if count < 0 else f"{count} results"
        words = [int.from_bytes(row.tobytes(), "little") for row in results[:count]]
        return ArrayRun(accepted.tolist(), words, cycles[:count].tolist())
