"""``plora device``: the functional device behind a file, for hosts in other languages."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from plora.hw.defs.config import PRESETS, preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say

SUMMARY = "be the device behind a file that a host in another language maps"

_EPILOG = """\
docs/host.md, "A host in C", describes the file and has an example.
"""


def configure(parser: CommandParser) -> None:
    """Add the flags of ``plora device``."""
    parser.epilog = _EPILOG
    parser.add_argument("--file", type=Path, required=True, help="the file to create; best in /dev/shm")
    parser.add_argument("--preset", default="tiny", help=f"{', '.join(PRESETS)} (default: tiny)")
    parser.add_argument("--memory-bytes", type=int, default=1 << 20, help="device memory (default: 1 MiB)")
    parser.add_argument(
        "--idle-seconds", type=float, default=60.0, help="give up after so long without a host (default: 60)"
    )


def run(args: argparse.Namespace) -> Result:
    """Serve until the host ends it."""
    from plora.sim.functional.shared import serve_file

    config = preset(args.preset)
    if not 0 < args.idle_seconds <= 86_400:
        raise UserError(f"--idle-seconds {args.idle_seconds:g}: choose above 0, at most 86400")
    # A device in the background is ended by `kill`; its file must go with it.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        served = serve_file(
            args.file,
            config,
            args.memory_bytes,
            idle_seconds=args.idle_seconds,
            ready=lambda: say(f"the {config.name} device is ready in {args.file}"),
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    return Result(
        data={"preset": config.name, "file": str(args.file), "register_accesses": served},
        text=f"{served} register accesses served",
    )
