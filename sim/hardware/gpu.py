"""A GPU as data-sheet facts, and the time of its kernels in two modes.

``roofline`` uses stated parameters only, as the paper does: the slower of memory and arithmetic,
no overhead. ``calibrated`` corrects each kind of kernel by coefficients fitted to measured H100
tables (`plora.sim.calibration.gpu`); for another GPU the same coefficients scale with its data
sheet, which is an assumption and is said in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Fact, Number, checked, fact, pick, read_table

GpuMode = Literal["roofline", "calibrated"]

_GPUS = Path(__file__).parent / "data" / "gpus.toml"


class _GpuData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of a GPU file."""

    hbm_gb_per_s: Number
    hbm_bytes: Number
    fp16_tflops: Number
    l2_bytes: Number = 0.0
    sms: Number = 132.0
    kernel_launch_us: Number = 6.0
    reserve_bytes: Number = 4e9
    fabric: str = "nvlink4"
    calibration: str = "h100-sxm"
    description: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    `hbm_gb_per_s` in 1e9 bytes/s, `fp16_tflops` dense, sizes in bytes. `kernel_launch_ns` is what a
    kernel launched from the host costs (not charged within a captured graph). `reserve_bytes` of
    HBM are kept for activations and workspace. `fabric` names the link between GPUs.
    """

    name: str
    description: str
    hbm_gb_per_s: float
    hbm_bytes: float
    fp16_tflops: float
    l2_bytes: float
    sms: float
    kernel_launch_ns: float
    reserve_bytes: float
    fabric: str
    calibration: str
    facts: Mapping[str, Fact] = field(default_factory=dict, compare=False)


def _build(name: str, data: _GpuData, where: str) -> Gpu:
    keys = ("hbm_gb_per_s", "hbm_bytes", "fp16_tflops", "sms")
    rate, size, flops, sms = (checked(getattr(data, k), f"{where}: {k}", exclusive=True) for k in keys)
    return Gpu(
        name=name,
        description=data.description,
        hbm_gb_per_s=rate,
        hbm_bytes=size,
        fp16_tflops=flops,
        l2_bytes=checked(data.l2_bytes, f"{where}: l2_bytes"),
        sms=sms,
        kernel_launch_ns=1e3 * checked(data.kernel_launch_us, f"{where}: kernel_launch_us"),
        reserve_bytes=checked(data.reserve_bytes, f"{where}: reserve_bytes", maximum=size),
        fabric=data.fabric,
        calibration=data.calibration,
        facts={k: fact(getattr(data, k)) for k in (*keys, "l2_bytes", "kernel_launch_us", "reserve_bytes")},
    )


@cache
def _bundled() -> dict[str, Gpu]:
    return {name: _build(name, data, f"gpus.toml: [{name}]") for name, data in read_table(_GPUS, _GpuData).items()}


def load_gpus(path: Path | None = None) -> dict[str, Gpu]:
    """The bundled GPUs, and those of `path` over them; raises :class:`UserError` for bad data."""
    own = read_table(path, _GpuData) if path is not None else {}
    return _bundled() | {name: _build(name, data, f"{path}: [{name}]") for name, data in own.items()}


def load_gpu(name: str, path: Path | None = None) -> Gpu:
    """One GPU by name; raises :class:`UserError` that lists the known names."""
    return pick(name, load_gpus(path), "GPU")


def roofline_ns(gpu: Gpu, bytes_moved: float, flops: float) -> float:
    """The slower of moving `bytes_moved` through HBM and doing `flops` at the dense FP16 peak."""
    if not (bytes_moved >= 0 and flops >= 0):
        raise UserError(f"GPU {gpu.name}: {bytes_moved} bytes and {flops} operations; give at least 0")
    return max(bytes_moved / gpu.hbm_gb_per_s, flops / (gpu.fp16_tflops * 1e3))
