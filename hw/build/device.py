"""The device itself as a library, at any size."""

from __future__ import annotations

import re
from pathlib import Path

from plora.hw.build.verilator import build_library
from plora.hw.build.verilog import TOP, device_verilog
from plora.hw.defs.config import NdpConfig

BLOCKS_FROM_CHANNELS = 8
"""Channels from which the part of the PE array that belongs to a channel is compiled once; see docs/decisions.md."""

_BLOCK = re.compile(r"^module (pe_channel\w*)\(", re.MULTILINE)

_ARITHMETIC = re.compile(r"^module ((?:fp16_product|grid_align|dot_unit|sum_adder|drain)\w*)\(", re.MULTILINE)
"""Three quarters of all signals, in hundreds of equal units: waves show what goes in and what comes out."""


def device_library(config: NdpConfig, *, trace: str | None = None) -> Path:
    """Return the shared library of the device at the sizes of ``config`` in its test bench, built where absent.

    Args:
        config: sizes of the device.
        trace: compile waves in, ``"vcd"`` or ``"fst"``.

    Raises:
        UserError: a tool is missing, or one of them failed.
    """
    verilog = device_verilog(config)
    return build_library(
        verilog,
        top=TOP,
        channels=config.channels,
        trace=trace,
        name=f"{TOP}-{config.name}",
        untraced=_ARITHMETIC.findall(verilog),
        blocks=_BLOCK.findall(verilog) if config.channels >= BLOCKS_FROM_CHANNELS else (),
    )
