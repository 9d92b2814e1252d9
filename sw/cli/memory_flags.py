"""Flags of the verbs that run a descriptor stream: the file, the device and its memory's timing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plora.hw.defs.config import PRESETS, preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser

if TYPE_CHECKING:
    from plora.sim.core.memory import MemoryTiming
    from plora.sim.device.stream import Stream


DESCRIPTORS_HELP = "descriptors as JSON Lines or CSV, see docs/device-model.md"


def add_stream_flags(parser: CommandParser) -> None:
    """Add them all."""
    parser.add_argument("--descriptors", metavar="FILE", type=Path, required=True, help=DESCRIPTORS_HELP)
    add_device_flags(parser)


def add_device_flags(parser: CommandParser) -> None:
    """Add all but the file."""
    add = parser.add_argument
    add("--preset", default="small", help=f"size of the device: {', '.join(PRESETS)} (default: small)")
    add("--read-latency", type=int, default=None, metavar="CYCLES", help="of memory (default: 40)")
    add("--write-latency", type=int, default=None, metavar="CYCLES", help="of memory (default: 20)")
    add(
        "--stall",
        type=float,
        default=0.0,
        metavar="P",
        help="probability that a side of a memory channel is not ready in a cycle (default: 0)",
    )


def stream_of(args: argparse.Namespace) -> Stream:
    """The stream of the flags, laid out in memory."""
    from plora.sim.device.stream import place, read_stream

    return place(preset(args.preset), read_stream(args.descriptors))


def timing_of(args: argparse.Namespace) -> MemoryTiming:
    """The memory of the flags.

    Raises:
        UserError: a value is out of range.
    """
    from plora.sim.core.memory import MemoryTiming

    for name in ("read_latency", "write_latency"):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= 100_000:
            raise UserError(f"--{name.replace('_', '-')} {value}: choose 0 ... 100000 cycles")
    return MemoryTiming(
        read_latency_cycles=40 if args.read_latency is None else args.read_latency,
        write_latency_cycles=20 if args.write_latency is None else args.write_latency,
        stall=args.stall,
    )
