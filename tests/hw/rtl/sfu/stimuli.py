"""Units that find faults in the SFU."""

from __future__ import annotations

import numpy as np

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.queue import SCALE_MAX_EXPONENT, SCALE_MIN_EXPONENT
from plora.hw.rtl.pe.drain import MAX_EXPONENT, MIN_EXPONENT, SCORE_BITS, score_layout
from tests.hw.rtl.sfu.bench import ROWS, TAG_BITS
from tests.hw.rtl.sfu.compiled import Unit

KINDS = ("any", "moderate", "close", "rising", "special")


def score(mantissa: int, exponent: int, negative: bool, *, infinite: bool = False, nan: bool = False) -> int:
    """Return a `score_layout` integer."""
    fields = {"mantissa": mantissa, "exponent": exponent, "negative": negative, "infinite": infinite, "nan": nan}
    return sum(int(value) << score_layout[name].offset for name, value in fields.items())


def score_of(value: float) -> int:
    """Return the score that is ``value`` cut toward zero."""
    magnitude = abs(value)
    exponent = max(int(np.frexp(magnitude)[1]) - 1, MIN_EXPONENT) if magnitude else MIN_EXPONENT
    return score(int(magnitude * 2.0 ** (SCORE_BITS - 1 - exponent)), exponent - MIN_EXPONENT, value < 0)


def fp32(value: float) -> int:
    """Return FP32 bits."""
    return int(np.float32(value).view(np.uint32))


def random_score(rng: np.random.Generator, kind: str, index: int) -> int:
    """Return a score: any exponent; around -8 ... 8; within one of each other; growing by the unit; or special."""
    if kind == "any" or (kind == "special" and rng.random() < 0.3):
        exponent = int(rng.integers(0, MAX_EXPONENT - MIN_EXPONENT + 1))
        mantissa = int(rng.integers(0, 1 << SCORE_BITS - 1)) | (exponent > 0) << SCORE_BITS - 1
        return score(mantissa, exponent, bool(rng.integers(2)))
    if kind == "special":
        noise, exponent = int(rng.integers(0, 1 << SCORE_BITS)), int(rng.integers(0, 32))
        negative = bool(rng.integers(2))
        choice = int(rng.integers(6))
        if choice < 3:
            return score(noise, exponent, negative, infinite=choice != 1, nan=choice != 0)
        if choice == 3:
            return score(0, 0, negative)
        # Whole numbers, and the ends of what t can be.
        return score_of(float(rng.choice([1.0, 2.0, 25.0, 32767.0, 32766.99, 32768.0, 65535.0])) * (1 - 2 * negative))
    if kind == "rising":
        return score_of(index * 0.7 + float(rng.normal()))
    return score_of(float(rng.normal(scale=8.0 if kind == "moderate" else 0.3)))


def random_unit(rng: np.random.Generator, config: NdpConfig, kind: str, index: int, row: int, *, begin: bool) -> Unit:
    """Return a unit of a row."""
    lanes = config.channels
    if kind in ("any", "special"):
        scale = (int(rng.integers(SCALE_MIN_EXPONENT, SCALE_MAX_EXPONENT + 1)) + 127 << 23) | int(rng.integers(1 << 23))
    else:
        scale = fp32(rng.choice([1.0, 1.0 / 3, 1.4426950408889634 / np.sqrt(128)]))
    exists = (1 << lanes) - 1 if rng.random() < 0.7 else int(rng.integers(1 << lanes))
    return Unit(
        scores=tuple(random_score(rng, kind, index) for _ in range(lanes)),
        overflow=int(rng.integers(1 << lanes)),
        exists=exists,
        row=row,
        begin=begin,
        scale=scale,
        tag=int(rng.integers(1 << TAG_BITS)),
    )


def noise(rng: np.random.Generator, config: NdpConfig) -> Unit:
    """Return what the ports hold in a cycle without a unit."""
    lanes = config.channels
    return Unit(
        scores=tuple(rng.integers(0, 1 << score_layout.size, lanes).tolist()),
        overflow=int(rng.integers(1 << lanes)),
        exists=int(rng.integers(1 << lanes)),
        row=int(rng.integers(ROWS)),
        begin=bool(rng.integers(2)),
        scale=int(rng.integers(1 << 32)),
        tag=int(rng.integers(1 << TAG_BITS)),
        valid=False,
    )


def random_units(rng: np.random.Generator, config: NdpConfig, kind: str, count: int, rows: int) -> list[Unit]:
    """Return units of so many rows, one row at most every second cycle, with gaps and fresh starts."""
    units: list[Unit] = []
    begun: set[int] = set()
    while len(units) < count:
        row = int(rng.integers(rows))
        if rng.random() < 0.15 or (units and units[-1].valid and units[-1].row == row):
            units.append(noise(rng, config))
            continue
        begin = row not in begun or rng.random() < 0.02
        begun.add(row)
        units.append(random_unit(rng, config, kind, len(units), row, begin=begin))
    return units
