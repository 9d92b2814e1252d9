"""``plora predict``: the cycle model's times for descriptors from a file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, table
from plora.sw.cli.memory_flags import add_stream_flags, stream_of, timing_of

if TYPE_CHECKING:
    from plora.sim.core.memory import MemoryTiming

SUMMARY = "cycles and energy of descriptors from a file, by the cycle model"

_EPILOG = """\
`plora rtl exec` runs the same file on the RTL; docs/device-model.md describes the file.

  plora predict --descriptors stream.jsonl --preset full --dram lpddr5x-8533 --json
"""


def configure(parser: CommandParser) -> None:
    """Add the flags of ``plora predict``."""
    parser.epilog = _EPILOG
    add_stream_flags(parser)
    parser.add_argument(
        "--dram",
        metavar="STANDARD",
        default=None,
        help="a memory of that standard instead of fixed latencies, as in the paper's device",
    )
    parser.add_argument(
        "--link", metavar="NAME", default="cxl3.1-x16", help="link whose energy counts (default: cxl3.1-x16)"
    )


def _timing(args: argparse.Namespace) -> MemoryTiming:
    if args.dram is None:
        return timing_of(args)
    from plora.sim.device.dram import dram_timing

    if args.read_latency is not None or args.write_latency is not None or args.stall:
        raise UserError("--dram sets latencies and rate: leave out --read-latency, --write-latency and --stall")
    return dram_timing(preset(args.preset), args.dram)


def run(args: argparse.Namespace) -> Result:
    """Predict the stream."""
    from plora.hw.defs.status import Status
    from plora.sim.device.energy import energies
    from plora.sim.device.predict import predict_stream, stream_demands

    stream, timing = stream_of(args), _timing(args)
    predicted = predict_stream(stream, timing)
    legal = stream_demands(stream, [p.status for p in predicted])
    dram = args.dram or "lpddr5x-8533"
    energy = iter(zip(*(e.tolist() for e in energies(stream.config, legal, dram=dram, link=args.link)), strict=True))
    rows: list[dict[str, Any]] = []
    for p in predicted:
        low, best, high = next(energy) if p.status is Status.OK else (0.0, 0.0, 0.0)
        rows.append(
            {
                "line": p.entry.line,
                "queue": p.entry.queue,
                "status": p.status.name,
                "cycles": _rounded(p.cycles),
                "fetched_cycle": _rounded(p.fetched_cycle),
                "completed_cycle": _rounded(p.completed_cycle),
                "energy_pj": {"low": round(low), "best": round(best), "high": round(high)},
            }
        )
    total = max(p.completed_cycle for p in predicted)
    best_pj = sum(row["energy_pj"]["best"] for row in rows)
    data = {
        "preset": stream.config.name,
        "memory": {
            "read_latency_cycles": timing.read_latency_cycles,
            "write_latency_cycles": timing.write_latency_cycles,
            "stall": timing.stall,
            "beat_cycles": timing.beat_cycles,
        },
        "total_cycles": _rounded(total),
        "total_energy_pj": {k: sum(row["energy_pj"][k] for row in rows) for k in ("low", "best", "high")},
        "descriptors": rows,
    }
    text = table(
        ("line", "queue", "status", "cycles", "fetched", "completed", "energy nJ"),
        [
            (
                *(str(row[key]) for key in ("line", "queue", "status", "cycles", "fetched_cycle", "completed_cycle")),
                f"{row['energy_pj']['best'] / 1000:.1f}",
            )
            for row in rows
        ],
    )
    text += f"\n\n{len(rows)} descriptors on {stream.config.name}: {_rounded(total)} cycles, {best_pj / 1000:.1f} nJ"
    return Result(data=data, text=text)


def _rounded(cycles: float) -> float | int:
    """Whole cycles as integers; expected values, where memory stalls at random, to a tenth."""
    return int(cycles) if cycles == int(cycles) else round(cycles, 1)
