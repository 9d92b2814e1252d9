"""Energy of what a descriptor moves and computes, as the range that public sources span."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Number, checked, pick, read_table

_ENERGY = Path(__file__).parent / "data" / "energy.toml"


class _EnergyData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of an energy file."""

    unit: Literal["pj_per_bit", "pj_per_operation"]
    low: Number
    best: Number
    high: Number


@dataclass(frozen=True)
class Energy:
    """Picojoules: the lowest and highest of the sources, and the estimate used."""

    low_pj: float
    best_pj: float
    high_pj: float

    def __add__(self, other: Energy) -> Energy:
        return Energy(self.low_pj + other.low_pj, self.best_pj + other.best_pj, self.high_pj + other.high_pj)

    def __mul__(self, count: float) -> Energy:
        return Energy(self.low_pj * count, self.best_pj * count, self.high_pj * count)


def _build(data: _EnergyData, where: str) -> Energy:
    low, best, high = (checked(getattr(data, key), f"{where}: {key}") for key in ("low", "best", "high"))
    if not low <= best <= high:
        raise UserError(f"{where}: low {low:g}, best {best:g}, high {high:g} must be in order")
    per_unit = 8.0 if data.unit == "pj_per_bit" else 1.0  # per byte, or per operation
    return Energy(low, best, high) * per_unit


@cache
def _bundled() -> dict[str, Energy]:
    return {name: _build(data, f"energy.toml: [{name}]") for name, data in read_table(_ENERGY, _EnergyData).items()}


def load_energies(path: Path | None = None) -> dict[str, Energy]:
    """Energy per byte (memories, links) or per operation, by name; `path` adds to the bundled ones."""
    own = read_table(path, _EnergyData) if path is not None else {}
    return _bundled() | {name: _build(data, f"{path}: [{name}]") for name, data in own.items()}


def work_energy(
    *,
    dram_bytes: float = 0.0,
    link_bytes: float = 0.0,
    multiply_adds: float = 0.0,
    sram_accesses: float = 0.0,
    dram: str = "lpddr5x-8533",
    link: str = "cxl3.1-x16",
    path: Path | None = None,
) -> Energy:
    """Energy of a descriptor, or of any sum of them: bytes of DRAM and link, multiply-adds, 64-byte buffer accesses.

    Raises :class:`UserError` for an unknown memory or link, and for a negative amount.
    """
    amounts = {"dram_bytes": dram_bytes, "link_bytes": link_bytes, "multiply_adds": multiply_adds}
    for name, amount in (amounts | {"sram_accesses": sram_accesses}).items():
        if not amount >= 0:
            raise UserError(f"energy of {name} {amount!r}; give a number of at least 0")
    table = load_energies(path)
    return (
        pick(dram, table, "memory with an energy") * dram_bytes
        + pick(link, table, "link with an energy") * link_bytes
        + table["multiply-add"] * multiply_adds
        + table["sram-64B"] * sram_accesses
    )
