"""``plora rtl wave``: every signal of the RTL while descriptors run, as a wave file."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say, umask
from plora.sw.cli.memory_flags import DESCRIPTORS_HELP, add_device_flags, stream_of, timing_of

SUMMARY = "write the waves of descriptors on the RTL, as FST or VCD"

_EPILOG = """\
Time steps: two a clock cycle, the clock falls in the first. The simulation with waves is a build of its own.

  plora rtl wave --case gemv-a-64k-batch1 --preset small --out gemv.fst
  plora rtl wave --descriptors stream.jsonl --preset tiny --out stream.vcd
"""
_SUFFIXES = (".fst", ".vcd")


def configure(parser: CommandParser) -> None:
    """Add the verb's flags."""
    parser.epilog = _EPILOG
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--descriptors", metavar="FILE", type=Path, help=DESCRIPTORS_HELP)
    what.add_argument("--case", metavar="NAME", help="one job of a case of `plora rtl bench`, which lists them")
    add_device_flags(parser)
    parser.add_argument("--seed", type=int, default=1, help="of the random stalls (default: 1)")
    # Here the common flag names the verb's one file.
    parser.add_argument_group("result", conflict_handler="resolve").add_argument(
        "--out", dest="wave", metavar="FILE", type=Path, required=True, help="wave file, .fst or .vcd by its name"
    )


def run(args: argparse.Namespace) -> Result:
    """Run the descriptors with waves on."""
    from plora.hw.cosim.device import RtlDevice
    from plora.sim.device.stream import Stream
    from plora.sw.cli.rtl_bench import choose_cases
    from plora.sw.stream_run import run_stream

    target: Path = args.wave
    _check_target(target)
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: choose 0 or more")
    config, timing = preset(args.preset), timing_of(args)
    stream: Stream
    if args.case is not None:
        cases = choose_cases(config, args.case)
        if len(cases) > 1:
            raise UserError(f"--case {args.case!r} names {len(cases)} cases, {cases[0].name} and others: name one")
        stream = cases[0].stream(config, 1)
    else:
        stream = stream_of(args)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
    os.close(handle)
    partial = Path(name)
    try:
        with RtlDevice(
            config,
            seed=args.seed,
            stall=timing.stall,
            read_latency_cycles=int(timing.read_latency_cycles),
            write_latency_cycles=int(timing.write_latency_cycles),
            trace=partial,
        ) as device:
            say(f"running {len(stream.entries)} descriptors on the {config.name} RTL with waves")
            settle = 100 + 4 * int(timing.read_latency_cycles)
            done = run_stream(stream, device, settle_cycles=settle)
        partial.chmod(0o666 & ~umask())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    size = target.stat().st_size
    data = {
        "preset": config.name,
        "file": target,
        "size_bytes": size,
        "descriptors": len(stream.entries),
        "start_cycle": done.start_cycle,
        "end_cycle": done.start_cycle + done.total_cycles,
        "steps_per_cycle": 2,
    }
    text = (
        f"{target}: {size} bytes; the doorbell is written in cycle {done.start_cycle}, the last completion is in"
        f" memory in cycle {done.start_cycle + done.total_cycles} (two time steps a cycle)"
    )
    return Result(data=data, text=text)


def _check_target(target: Path) -> None:
    """Refuse a wave file that could not be written, before anything is built."""
    if target.suffix not in _SUFFIXES:
        raise UserError(f"--out {target}: name a file that ends in {' or '.join(_SUFFIXES)}")
    if target.is_dir():
        raise UserError(f"--out {target}: is a folder; name a file")
    if not target.parent.is_dir():
        raise UserError(f"--out {target}: there is no folder {target.parent}; make it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(f"--out {target}: no permission to write in {target.parent}")
