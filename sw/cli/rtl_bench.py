"""``plora rtl bench``: the RTL's speed by its own counters, held against what bounds it."""

from __future__ import annotations

import argparse
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say, table

if TYPE_CHECKING:
    from plora.hw.cosim.device import RtlDevice
    from plora.sw.rtl_cases import BenchCase

SUMMARY = "measure the RTL's speed by its counters and judge it by what bounds it"

EXIT_TOO_SLOW = 1

_EPILOG = """\
docs/core.md defines the columns and the limits.

  plora rtl bench --preset full --json
  plora rtl bench --preset small --cases 'gemv-*,lora-batch1'
"""


def configure(parser: CommandParser) -> None:
    """Add the verb's flags."""
    parser.epilog = _EPILOG
    parser.add_argument("--preset", default="small", help=f"{', '.join(PRESETS)} (default: small)")
    parser.add_argument(
        "--cases", metavar="PATTERNS", default="*", help="comma-separated shell patterns of case names (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and run none")
    parser.add_argument("--seed", type=int, default=1, help="of the random stalls (default: 1)")


def run(args: argparse.Namespace) -> Result:
    """Measure the chosen cases."""
    from plora.sw.rtl_bench import as_row, measure

    config = preset(args.preset)
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: choose 0 or more")
    cases = choose_cases(config, args.cases)
    if args.list:
        rows = [{"case": case.name, "operation": case.operation, "shape": case.shape} for case in cases]
        return Result(
            data={"preset": config.name, "cases": rows},
            text=table(("case", "operation", "shape"), [tuple(row.values()) for row in rows]),
        )

    def open_device(case: BenchCase) -> RtlDevice:
        return open_case(case, config, args.seed)

    rows, cycles, start = [], 0, time.process_time()
    for number, case in enumerate(cases, 1):
        found = measure(case, config, open_device)
        rows.append(as_row(found))
        cycles += found.simulated_cycles
        say(f"{number} of {len(cases)}: {case.name} {'' if found.passed else 'MISSED'}".rstrip())
    seconds = time.process_time() - start
    missed = [row["case"] for row in rows if not row["pass"]]
    data = {
        "preset": config.name,
        "multiply_add_units": config.multiply_adds,
        "memory": {"read_latency_cycles": 40, "write_latency_cycles": 20},
        "seed": args.seed,
        "simulated_cycles": cycles,
        "pass": not missed,
        "missed": missed,
        "cases": rows,
        # All that may differ from one run to the next.
        "timing": {"cpu_s": round(seconds, 3), "simulated_cycles_per_cpu_s": round(cycles / seconds)},
    }
    return Result(data=data, text=_text(data), exit_status=EXIT_TOO_SLOW if missed else 0)


def choose_cases(config: NdpConfig, patterns: str) -> list[BenchCase]:
    """The cases whose names match one of the comma-separated patterns.

    Raises:
        UserError: a pattern matches none.
    """
    from plora.sw.rtl_cases import bench_cases

    cases = bench_cases(config)
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise UserError(f"{pattern!r} is no case of {config.name}: `plora rtl bench --list` shows them")
    return [case for case in cases if any(fnmatchcase(case.name, pattern) for pattern in wanted)]


def open_case(case: BenchCase, config: NdpConfig, seed: int, trace: Any = None) -> RtlDevice:
    """The RTL with the memory of ``case``, built where that was not done before."""
    from plora.hw.cosim.device import RtlDevice

    return RtlDevice(
        config,
        seed=seed,
        stall=case.timing.stall,
        read_latency_cycles=int(case.timing.read_latency_cycles),
        write_latency_cycles=int(case.timing.write_latency_cycles),
        trace=trace,
    )


def _text(data: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:g}"

    head = (
        *("case", "shape", "cycles", "useful beats", "multiply-adds", "exps a cycle", "of"),
        *("period", "bound", "", "gap", "limits"),
    )
    lines = table(
        head,
        [
            (
                row["case"],
                row["shape"],
                str(row["cycles"]),
                f"{row['useful_beat_fraction']:.1%}",
                f"{row['multiply_add_utilisation']:.1%}",
                number(row["exps_per_cycle_delivered"]),
                number(row["exps_per_cycle_needed"]),
                number(row["period_cycles"]),
                row["bound"],
                number(row["bound_cycles"]),
                number(row["gap_cycles"]),
                ("met" if row["checks"] else "-") if row["pass"] else "MISSED",
            )
            for row in data["cases"]
        ],
        left=2,
    )
    parts = [lines, ""]
    for row in data["cases"]:
        for check in row["checks"]:
            if not check["pass"]:
                relation, limit = next((key, check[key]) for key in ("at_most", "at_least") if key in check)
                parts.append(
                    f"MISSED {row['case']}: {check['what']} is {check['measured']:g},"
                    f" should be {relation.replace('_', ' ')} {limit:g}"
                )
        parts += [f"MISSED {row['case']}: {fault}" for fault in row["faults"]]
    if any(not row["checks"] for row in data["cases"]):
        parts.append("-: the buffers of this size do not cover the latency of memory, which these cases are bound by")
    met = len(data["cases"]) - len(data["missed"])
    parts.append(
        f"{met} of {len(data['cases'])} cases on the {data['preset']} RTL within their limits, every result bit for bit"
        f" that of the functional device; {data['simulated_cycles']} cycles simulated"
    )
    return "\n".join(parts)
