"""``plora calibrate``: the cycle model held against the RTL on random descriptors, chains and mixes of queues."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plora.hw.defs.config import PRESETS
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say, table, write_files

if TYPE_CHECKING:
    from plora.sim.calibration.device import Comparison, Measured
    from plora.sim.calibration.device_cases import Case

SUMMARY = "hold the cycle model against the RTL and report its error"

EXIT_DRIFT = 1
_CHECK_CASES = 27
_CHECK_SEEDS = 6

_EPILOG = """\
  plora calibrate --check --json     a sample on `small`; fails where RTL and model have drifted apart
  plora calibrate --write            everything; replaces the committed result (takes some minutes)
"""


def configure(parser: CommandParser) -> None:
    """Add the verb's flags."""
    parser.epilog = _EPILOG
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="a sample only, and whether the committed result is current")
    mode.add_argument("--write", action="store_true", help="replace the committed result")
    parser.add_argument("--preset", default=None, help=f"one preset only: {', '.join(PRESETS)}")
    parser.add_argument("--cases", type=int, default=None, metavar="N", help="number of cases of each preset")
    parser.add_argument("--seeds", type=int, default=None, metavar="N", help="RTL runs of a case with random stalls")


def run(args: argparse.Namespace) -> Result:
    """Run the cases on the RTL and compare."""
    from plora.sim.calibration import device as calibration
    from plora.sim.calibration.device_cases import cases

    for name in ("cases", "seeds"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 10_000:
            raise UserError(f"--{name} {value}: choose 1 ... 10000")
    if args.preset is not None and args.preset not in PRESETS:
        raise UserError(f"unknown device preset {args.preset!r}; choose one of {', '.join(PRESETS)}")
    if args.write and (args.preset or args.cases or args.seeds):
        raise UserError("--write replaces the whole result: leave out --preset, --cases and --seeds")
    wanted = {"small": _CHECK_CASES} if args.check else dict(calibration.CASES)
    if args.preset is not None:
        wanted = {args.preset: wanted.get(args.preset, _CHECK_CASES)}
    comparisons = []
    for preset_name, count in wanted.items():
        seeds = args.seeds or (_CHECK_SEEDS if args.check else calibration.SEEDS.get(preset_name, _CHECK_SEEDS))
        total = args.cases or count
        say(f"running {total} cases on the {preset_name} RTL")
        for case in cases(preset_name, total):
            comparisons.append(calibration.compare(case, _measure(case, seeds)))
            if len(comparisons) % 25 == 0:
                say(f"  {len(comparisons)} cases, mean error {calibration.figures(comparisons)['mean_abs_error']:.3%}")
    data: dict[str, Any] = {**calibration.summary(comparisons), "within_limits": calibration.within_limits(comparisons)}
    good = data["within_limits"]
    if args.check:
        stale = calibration.repredicted(calibration.committed())
        data["stale_predictions"] = len(stale)
        good = good and not stale
    document, picture = calibration.document(comparisons), calibration.picture(comparisons)
    if args.write:
        files = {calibration.PICTURE.name: picture, calibration.RESULT.name: document}
        write_files(calibration.RESULT.parent, files)
    files = {"comparisons.json": document, "errors.svg": picture}
    return Result(data=data, text=_text(data, comparisons), files=files, exit_status=0 if good else EXIT_DRIFT)


def _measure(case: Case, seeds: int) -> Measured:
    """Run a case on the RTL, with random stalls ``seeds`` times."""
    import numpy as np

    from plora.hw.cosim.device import RtlDevice
    from plora.sim.calibration.device import Measured, stream_of
    from plora.sw.stream_run import run_stream

    stream, config, timing = stream_of(case), case.config, case.timing
    runs = []
    for seed in range(1, (seeds if timing.stall else 1) + 1):
        with RtlDevice(
            config,
            dram_bytes=min(1 << config.dpa_bits, 1 << 30),
            seed=seed,
            stall=timing.stall,
            read_latency_cycles=int(timing.read_latency_cycles),
            write_latency_cycles=int(timing.write_latency_cycles),
        ) as device:
            runs.append(run_stream(stream, device, load=False, settle_cycles=100 + 4 * int(timing.read_latency_cycles)))
    totals = [float(r.total_cycles) for r in runs]
    return Measured(
        total_cycles=float(np.mean(totals)),
        spread_cycles=float(np.std(totals)),
        completed_cycles=tuple(np.mean([[f.completed_cycle for f in r.finished] for r in runs], axis=0).tolist()),
        span_cycles=tuple(np.mean([[f.cycles for f in r.finished] for r in runs], axis=0).tolist()),
    )


def _text(data: dict[str, Any], comparisons: Sequence[Comparison]) -> str:
    rows = [("all", data)]
    for key in ("by_preset", "by_kind", "by_read_latency_cycles", "by_stall"):
        rows += [
            (f"{key[3:].split('_cycles')[0].replace('_', ' ')} {name}", found) for name, found in data[key].items()
        ]
    lines = table(
        ("cases of", "number", "mean error", "largest", "in cycles", "bias", "outside"),
        [
            (
                name,
                str(found["cases"]),
                f"{found['mean_abs_error']:.3%}",
                f"{found['max_abs_error']:.2%}",
                f"{found['max_abs_error_cycles']:.1f}",
                f"{found['bias']:+.3%}",
                str(found["outside_limits"]),
            )
            for name, found in rows
        ],
    )
    parts = [lines, "", "error of a case, percent:"]
    edges, counts = data["histogram_percent"]["edges"], data["histogram_percent"]["counts"]
    names = [f"below {edges[0]:g}", *(f"{a:g} ... {b:g}" for a, b in itertools.pairwise(edges))]
    widest = max(counts)
    for name, count in zip([*names, f"above {edges[-1]:g}"], counts, strict=True):
        parts.append(f"{name:>14}  {'#' * -(-40 * count // widest)} {count}")
    parts += ["", "worst of each kind:"]
    parts.append(
        table(
            ("kind", "case", "RTL cycles", "model", "error", "latency", "stall"),
            [
                (
                    kind,
                    w["case"],
                    f"{w['rtl_cycles']:.1f}",
                    f"{w['rtl_cycles'] + w['error_cycles']:.1f}",
                    f"{w['error']:+.2%}",
                    f"{w['read_latency_cycles']:g}",
                    f"{w['stall']:g}",
                )
                for kind, w in data["worst_by_kind"].items()
            ],
        )
    )
    if data.get("stale_predictions"):
        parts += ["", f"{data['stale_predictions']} committed predictions have changed: run `plora calibrate --write`"]
    if not data["within_limits"]:
        parts += ["", f"RTL and model have drifted apart on {data['outside_limits']} of {len(comparisons)} cases"]
    return "\n".join(parts)
