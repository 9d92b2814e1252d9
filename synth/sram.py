"""What the buffers cost: area, energy, leakage and access time of SRAM at 45 nm, as ranges.

Nothing open can lay these macros out, so this is a model between public points, and every figure is a
range with a best estimate. Two families of points bound it:

- CACTI 7 at 45 nm (measured for this project with its default high-performance cells) for 3 MB in
  macros of several sizes, with one shared port and with one read and one write port;
- the CACTI-derived 512 x 64 macro that OpenROAD ships for tests at 45 nm (``fakeram45_512x64.lib``):
  17301 um2, 0.305 ns, 5.3 pJ a read, 0.82 mW leakage.

Bit cells at 45 nm: 6T 0.346 um2 (Intel, Mistry et al., IEDM 2007) to 0.374 um2. A cell with a read port of
its own (8T) takes about 1.3 times as much.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

KIB = 1024

BIT_CELL_UM2 = (0.346, 0.374)
"""Published 6T cells at 45 nm."""

PAPER_BUFFERS_MM2 = 44.22
PAPER_BUFFERS_BYTES = 3 * KIB * KIB


@dataclass(frozen=True)
class CactiPoint:
    """CACTI 7, 45 nm, 64-byte words: total for 3 MB in macros of ``macro_bytes``."""

    macro_bytes: int
    ports: str
    mm2: float
    access_ns: float | None = None
    read_pj: float | None = None
    leakage_w: float | None = None

    @property
    def um2_per_bit(self) -> float:
        """Area per bit, periphery included."""
        return self.mm2 * 1e6 / (8 * PAPER_BUFFERS_BYTES)


CACTI_POINTS = (
    CactiPoint(1024 * KIB, "1RW", 11.9, access_ns=2.2),
    CactiPoint(64 * KIB, "1RW", 9.8, access_ns=0.57, read_pj=40.0, leakage_w=2.4),
    CactiPoint(64 * KIB, "1R1W", 20.4),
    CactiPoint(8 * KIB, "1R1W", 25.7),
)

TEST_MACRO_UM2_PER_BIT = 17301.438 / (512 * 64)
TEST_MACRO_LEAKAGE_NW_PER_BIT = 823237.0 / (512 * 64)
TEST_MACRO_READ_FJ_PER_BIT = 5300.43 / 64
TEST_MACRO_BITS = 512 * 64


@dataclass(frozen=True)
class Range:
    """A figure that is only known to lie between ``low`` and ``high``."""

    low: float
    best: float
    high: float

    def scaled(self, factor: float) -> Range:
        """Return the range times ``factor``."""
        return Range(self.low * factor, self.best * factor, self.high * factor)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.best + other.best, self.high + other.high)

    def as_dict(self, digits: int = 4) -> dict[str, float]:
        """Return the range as a JSON object."""
        return {name: float(f"{getattr(self, name):.{digits}g}") for name in ("low", "best", "high")}


@dataclass(frozen=True)
class SramMacro:
    """A memory of a design: ``depth`` words of ``width`` bits, one read and one write port."""

    width: int
    depth: int

    @property
    def bits(self) -> int:
        """Bits stored."""
        return self.width * self.depth

    def um2_per_bit(self) -> Range:
        """Area per bit with periphery.

        ``high``: two ports, between CACTI's two sizes, linear in the logarithm of the size.
        ``low``: one port (a design whose macros are read and written in different cycles, or split in
        two banks that alternate), CACTI's figure for 64 KiB or, below that, growing to the test macro's.
        ``best``: two ports by 8T cells at the array efficiency of the single-port macro.
        """
        one_port = _between(self.bits, (TEST_MACRO_BITS, TEST_MACRO_UM2_PER_BIT), _point(64 * KIB, "1RW"))
        two_ports = _between(self.bits, _point(8 * KIB, "1R1W"), _point(64 * KIB, "1R1W"))
        return Range(one_port, one_port * EIGHT_T_OVER_SIX_T, two_ports)

    def area_mm2(self) -> Range:
        """Area of the macro."""
        return self.um2_per_bit().scaled(self.bits * 1e-6)

    def access_pj(self) -> Range:
        """Energy of one access to a whole word.

        Between the test macro's energy per bit (low; short bit lines) and CACTI's 40 pJ per 512 bits
        of a 64 KiB macro, which is also the best estimate; half as much again for large periphery.
        """
        cacti = 40.0 / 512
        test = TEST_MACRO_READ_FJ_PER_BIT * 1e-3
        low, high = min(cacti, test), max(cacti, test)
        return Range(low * 0.6, (low + high) / 2, high * 1.5).scaled(self.width)

    def leakage_mw(self) -> Range:
        """Static power at 25 C (test macro) to hot (CACTI's default, high-performance cells)."""
        cool = TEST_MACRO_LEAKAGE_NW_PER_BIT * 1e-6
        hot = 2400.0 / (8 * PAPER_BUFFERS_BYTES)
        return Range(cool / 2, math.sqrt(cool * hot), hot).scaled(self.bits)

    def access_ns(self) -> float:
        """Clock to data: 0.305 ns at 4 KiB, 0.57 ns at 64 KiB, with the square root of the size between and beyond."""
        small, large = math.sqrt(TEST_MACRO_BITS), math.sqrt(8 * 64 * KIB)
        slope = (0.57 - 0.305) / (large - small)
        return max(0.2, 0.305 + slope * (math.sqrt(self.bits) - small))


EIGHT_T_OVER_SIX_T = 1.3
"""Area of an 8T cell (a read port of its own) over a 6T cell's, thin-cell layouts."""

SETUP_NS = 0.05
"""Setup of address and data at a macro (the test macro's)."""


def _point(macro_bytes: int, ports: str) -> tuple[float, float]:
    (point,) = (p for p in CACTI_POINTS if p.macro_bytes == macro_bytes and p.ports == ports)
    return 8.0 * macro_bytes, point.um2_per_bit


def _between(bits: float, small: tuple[float, float], large: tuple[float, float]) -> float:
    """Return the value at ``bits`` on the line through two points over log(bits), flat beyond the larger."""
    where = math.log(bits / small[0]) / math.log(large[0] / small[0])
    return small[1] + min(where, 1.0) * (large[1] - small[1])


def total_area_mm2(macros: Counter[SramMacro]) -> Range:
    """Return the area of all ``macros``."""
    total = Range(0.0, 0.0, 0.0)
    for macro, count in macros.items():
        total += macro.area_mm2().scaled(count)
    return total


def total_leakage_w(macros: Counter[SramMacro]) -> Range:
    """Return the static power of all ``macros``."""
    total = Range(0.0, 0.0, 0.0)
    for macro, count in macros.items():
        total += macro.leakage_mw().scaled(count * 1e-3)
    return total


def paper_um2_per_bit() -> float:
    """Return what the paper's buffers take per bit (section VII-H: 44.22 mm2 for 3 MB)."""
    return PAPER_BUFFERS_MM2 * 1e6 / (8 * PAPER_BUFFERS_BYTES)
