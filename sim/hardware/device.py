"""A memory device of the pool, with or without near-data compute, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Fact, Number, checked, fact, pick, read_table

_DEVICES = Path(__file__).parent / "data" / "devices.toml"


class _DeviceData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of a device file."""

    dram_gb_per_s: Number
    capacity_bytes: Number
    ndp_tflops: Number
    sram_bytes: Number = 0.0
    dram: str = "lpddr5x-8533"
    channels: int = 64
    description: str = ""


@dataclass(frozen=True)
class NdpDeviceSpec:
    """One pool device.

    `dram_gb_per_s` is the stated rate (1e9 bytes/s); `dram` and `channels` describe the memory from
    which `plora.sim.hardware.dram` computes what is achieved. `ndp_tflops` is 0 for a plain expander.
    """

    name: str
    description: str
    dram_gb_per_s: float
    capacity_bytes: float
    ndp_tflops: float
    sram_bytes: float
    dram: str
    channels: int
    facts: Mapping[str, Fact] = field(default_factory=dict, compare=False)

    @property
    def has_ndp(self) -> bool:
        """Whether the device computes."""
        return self.ndp_tflops > 0


def _build(name: str, data: _DeviceData, where: str) -> NdpDeviceSpec:
    if data.channels < 1:
        raise UserError(f"{where}: channels is {data.channels}; give at least 1")
    return NdpDeviceSpec(
        name=name,
        description=data.description,
        dram_gb_per_s=checked(data.dram_gb_per_s, f"{where}: dram_gb_per_s", exclusive=True),
        capacity_bytes=checked(data.capacity_bytes, f"{where}: capacity_bytes", exclusive=True),
        ndp_tflops=checked(data.ndp_tflops, f"{where}: ndp_tflops"),
        sram_bytes=checked(data.sram_bytes, f"{where}: sram_bytes"),
        dram=data.dram,
        channels=data.channels,
        facts={k: fact(getattr(data, k)) for k in ("dram_gb_per_s", "capacity_bytes", "ndp_tflops", "sram_bytes")},
    )


@cache
def _bundled() -> dict[str, NdpDeviceSpec]:
    table = read_table(_DEVICES, _DeviceData)
    return {name: _build(name, data, f"devices.toml: [{name}]") for name, data in table.items()}


def load_devices(path: Path | None = None) -> dict[str, NdpDeviceSpec]:
    """The bundled devices, and those of `path` over them; raises :class:`UserError` for bad data."""
    own = read_table(path, _DeviceData) if path is not None else {}
    return _bundled() | {name: _build(name, data, f"{path}: [{name}]") for name, data in own.items()}


def load_device(name: str, path: Path | None = None) -> NdpDeviceSpec:
    """One device by name; raises :class:`UserError` that lists the known names."""
    return pick(name, load_devices(path), "device")
