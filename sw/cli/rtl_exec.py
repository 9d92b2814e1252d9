"""``plora rtl exec``: descriptors from a file on the simulated RTL, each completion with its cycle."""

from __future__ import annotations

import argparse
from typing import Any

from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say, table
from plora.sw.cli.memory_flags import add_stream_flags, stream_of, timing_of

SUMMARY = "run descriptors from a file on the RTL and time them"

EXIT_MISMATCH = 1
_SEEDS_WITH_STALLS = 8
_DRAM_BYTES = 1 << 30


def configure(parser: CommandParser) -> None:
    """Add the flags of ``plora rtl exec``, all but ``--preset``."""
    add_stream_flags(parser)
    parser.add_argument("--seed", type=int, default=1, help="first seed of the random stalls (default: 1)")
    parser.add_argument(
        "--seeds",
        type=int,
        default=None,
        metavar="N",
        help=f"runs, each with its own seed, of which means are given (default: 1, with --stall {_SEEDS_WITH_STALLS})",
    )


def run(args: argparse.Namespace) -> Result:
    """Run the stream."""
    from plora.hw.cosim.device import RtlDevice
    from plora.hw.defs.status import Status
    from plora.sw.stream_run import differences, run_stream

    stream, timing = stream_of(args), timing_of(args)
    seeds = args.seeds if args.seeds is not None else _SEEDS_WITH_STALLS if timing.stall else 1
    if not 1 <= seeds <= 1000:
        raise UserError(f"--seeds {seeds}: choose 1 ... 1000")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: choose 0 or more")
    config = stream.config
    say(f"running {len(stream.entries)} descriptors on the {config.name} RTL, {seeds} times")
    runs, wrong = [], []
    for seed in range(args.seed, args.seed + seeds):
        with RtlDevice(
            config,
            dram_bytes=min(1 << config.dpa_bits, _DRAM_BYTES),
            seed=seed,
            stall=timing.stall,
            read_latency_cycles=int(timing.read_latency_cycles),
            write_latency_cycles=int(timing.write_latency_cycles),
        ) as device:
            runs.append(run_stream(stream, device))
            wrong += list(differences(stream, device))

    def mean(values: list[int]) -> float | int:
        return values[0] if len(values) == 1 else round(sum(values) / len(values), 2)

    rows: list[dict[str, Any]] = []
    for index, done in enumerate(runs[0].finished):
        rows.append(
            {
                "line": done.entry.line,
                "queue": done.entry.queue,
                "status": Status(done.status).name,
                "cycles": mean([r.finished[index].cycles for r in runs]),
                "completed_cycle": mean([r.finished[index].completed_cycle for r in runs]),
                "result_bytes": done.result_bytes,
            }
        )
    total = mean([r.total_cycles for r in runs])
    data = {
        "preset": config.name,
        "memory": {
            "read_latency_cycles": timing.read_latency_cycles,
            "write_latency_cycles": timing.write_latency_cycles,
            "stall": timing.stall,
        },
        "seeds": seeds,
        "total_cycles": total,
        "match": not wrong,
        "differences": wrong,
        "counters": runs[0].counters,
        "descriptors": rows,
    }
    text = table(
        ("line", "queue", "status", "cycles", "completed", "result bytes"),
        [
            tuple(str(row[key]) for key in ("line", "queue", "status", "cycles", "completed_cycle", "result_bytes"))
            for row in rows
        ],
    )
    verdict = "all results equal the functional device's bit for bit" if not wrong else "\n".join(wrong)
    text += f"\n\n{len(rows)} descriptors on the {config.name} RTL: {total} cycles; {verdict}"
    return Result(data=data, text=text, exit_status=EXIT_MISMATCH if wrong else 0)
