"""Compares the closed-form DRAM model with public figures and with the cycle-level model.

    python -m plora.sim.calibration.dram [--check]

Writes ``results/dram.json``; ``--check`` compares with it instead and exits 1 on a difference.
Takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plora.sim.hardware.dram import Controller, DramStandard, achieved_gb_per_s, load_standards
from plora.sim.hardware.dram_cycles import Access, simulate, stream

RESULT = Path(__file__).parent / "results" / "dram.json"

PUBLIC = {
    ("lpddr5-6400", "read, no refresh"): 12.80,
    ("lpddr5-6400", "read"): 11.95,
    ("lpddr5-6400", "half read, half write"): 9.01,
    ("hbm3-6400", "read"): 23.36,
}
"""Ramulator 2.1, FR-FCFS, open page, all-bank refresh, one entry per burst; GB/s of one channel."""

RUNS_BYTES = (64, 128, 256, 512, 1024, 2048)
READ_FRACTIONS = (1.0, 0.9, 0.5, 0.0)
_ACCESSES = 6000


def random_visits(
    standard: DramStandard, run_bytes: int, read_fraction: float, access_bytes: int = 64
) -> Iterator[Access]:
    """Endless visits to random rows, each `run_bytes` long and all read or all write. Always the same."""
    rng = np.random.default_rng(1)
    while True:
        bank, row = int(rng.integers(standard.banks)), int(rng.integers(1 << 15))
        write = bool(rng.random() >= read_fraction)
        for _ in range(max(1, run_bytes // access_bytes)):
            yield bank, row, write


def streams(standard: DramStandard) -> dict[str, tuple[float, float]]:
    """Closed form and cycle-level rate of sequential streams, with one queue entry per burst."""
    burst = Controller(access_bytes=standard.burst_bytes)
    size = standard.burst_bytes
    return {
        "read, no refresh": (
            achieved_gb_per_s(standard, refresh=False, controller=burst),
            simulate(standard, stream(standard, size), 20000, controller=burst, refresh=False),
        ),
        "read": (
            achieved_gb_per_s(standard, controller=burst),
            simulate(standard, stream(standard, size), 20000, controller=burst),
        ),
        "half read, half write": (
            achieved_gb_per_s(standard, read_fraction=0.5, controller=burst),
            simulate(standard, stream(standard, size, write_every=2), 20000, controller=burst),
        ),
    }


def compare() -> dict[str, Any]:
    """The content of the committed file."""
    cases: list[dict[str, Any]] = []
    for name, standard in load_standards().items():
        for case, (form, cycles) in streams(standard).items():
            entry: dict[str, Any] = {"standard": name, "case": case, "closed_form": form, "cycle_level": cycles}
            if (name, case) in PUBLIC:
                entry["public"] = PUBLIC[name, case]
            cases.append(entry)
        for run in RUNS_BYTES:
            for reads in READ_FRACTIONS:
                visits = random_visits(standard, run, reads)
                cycles = simulate(standard, visits, _ACCESSES, controller=Controller())
                form = achieved_gb_per_s(standard, run, reads)
                case = f"random runs of {run} B, {reads:.0%} reads"
                cases.append({"standard": name, "case": case, "closed_form": form, "cycle_level": cycles})
    for entry in cases:
        for key in ("closed_form", "cycle_level"):
            entry[key] = round(entry[key], 3)
    random = [abs(c["closed_form"] / c["cycle_level"] - 1) for c in cases if c["case"].startswith("random")]
    return {
        "unit": "GB/s of one channel",
        "random_mean_abs_percent": round(100 * sum(random) / len(random), 2),
        "random_max_abs_percent": round(100 * max(random), 2),
        "cases": cases,
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plora.sim.calibration.dram")
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    options = parser.parse_args(arguments)
    result = compare()
    for case in result["cases"]:
        public = f"{case['public']:8.2f}" if "public" in case else " " * 8
        error = 100 * (case["closed_form"] / case["cycle_level"] - 1)
        print(
            f"{case['standard']:14s} {case['case']:34s} public {public}  cycle-level {case['cycle_level']:7.3f}  "
            f"closed form {case['closed_form']:7.3f}  {error:+6.2f} %"
        )
    print(f"random: mean {result['random_mean_abs_percent']} %, max {result['random_max_abs_percent']} %")
    if options.check:
        committed = json.loads(RESULT.read_text(encoding="utf-8"))
        same = len(committed["cases"]) == len(result["cases"]) and all(
            math.isclose(a[k], b[k], rel_tol=1e-3)
            for a, b in zip(committed["cases"], result["cases"], strict=True)
            for k in ("closed_form", "cycle_level")
        )
        print("same as committed" if same else "differs from the committed result")
        return 0 if same else 1
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
