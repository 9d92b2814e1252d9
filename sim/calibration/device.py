"""The cycle model held against the RTL: errors by operation, memory and size, and what may be committed.

`plora calibrate` runs the cases of `plora.sim.calibration.device_cases` on the RTL; this module compares and
reports. No shape of theirs was used in making the model, whose constants are derived from the RTL's
structure (sim/core/data/core.toml).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.calibration.device_cases import Case, cases
from plora.sim.calibration.histogram import histogram_svg
from plora.sim.device.predict import predict_stream
from plora.sim.device.stream import Stream, lines_of, place

RESULT = Path(__file__).parent / "results" / "device.json"
PICTURE = RESULT.with_suffix(".svg")
"""The histogram of the errors in it."""

CASES = {"small": 360, "full": 90}
"""Cases of the committed comparison."""
SEEDS = {"small": 8, "full": 6}
"""RTL runs of a case with random stalls, of which the mean counts."""

MEAN_LIMIT = 0.01
MAX_LIMIT = 0.03
MAX_LIMIT_CYCLES = 8.0
"""A case is within limits if it is off by at most `MAX_LIMIT` of its cycles or by so many, whichever is more."""


EDGES_PERCENT = (-3.0, -2.0, -1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0)
"""Of the histogram of errors."""


@dataclass(frozen=True)
class Measured:
    """A case on the RTL: means over its runs."""

    total_cycles: float
    """From the first doorbell to the last completion."""
    spread_cycles: float
    """Standard deviation of a single run."""
    completed_cycles: tuple[float, ...]
    span_cycles: tuple[float, ...]
    """First to last beat of every descriptor."""


@dataclass(frozen=True)
class Comparison:
    """A case on both."""

    number: int
    preset: str
    kind: str
    read_latency_cycles: float
    stall: float
    descriptors: int
    rtl_cycles: float
    rtl_spread_cycles: float
    model_cycles: float
    worst_descriptor_cycles: float
    """Largest error of a descriptor's completion."""
    rtl_span_cycles: float
    model_span_cycles: float
    """First to last beat, summed over the descriptors."""

    @property
    def error_cycles(self) -> float:
        """Model less RTL."""
        return self.model_cycles - self.rtl_cycles

    @property
    def error(self) -> float:
        """The same as a share of the RTL's cycles."""
        return self.error_cycles / self.rtl_cycles

    @property
    def within_limits(self) -> bool:
        """Whether the case is as close as it should be."""
        return abs(self.error_cycles) <= max(MAX_LIMIT * self.rtl_cycles, MAX_LIMIT_CYCLES)


def stream_of(case: Case) -> Stream:
    """The case's stream, laid out in memory."""
    return place(case.config, lines_of(case.rows))


def compare(case: Case, measured: Measured) -> Comparison:
    """Predict a case and set it beside what the RTL took."""
    predicted = predict_stream(stream_of(case), case.timing)
    completed = np.array([p.completed_cycle for p in predicted])
    return Comparison(
        number=case.number,
        preset=case.preset,
        kind=case.kind,
        read_latency_cycles=case.timing.read_latency_cycles,
        stall=case.timing.stall,
        descriptors=len(case.rows),
        rtl_cycles=round(measured.total_cycles, 3),
        rtl_spread_cycles=round(measured.spread_cycles, 3),
        model_cycles=round(float(completed.max()), 3),
        worst_descriptor_cycles=round(float(np.abs(completed - measured.completed_cycles).max()), 3),
        rtl_span_cycles=round(sum(measured.span_cycles), 3),
        model_span_cycles=round(sum(p.cycles for p in predicted), 3),
    )


def figures(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Mean and largest error of some comparisons, as shares of the RTL's cycles and in cycles."""
    errors = np.array([c.error for c in comparisons])
    cycles = np.array([c.error_cycles for c in comparisons])
    return {
        "cases": len(comparisons),
        "mean_abs_error": round(float(np.abs(errors).mean()), 6),
        "max_abs_error": round(float(np.abs(errors).max()), 6),
        "max_abs_error_cycles": round(float(np.abs(cycles).max()), 3),
        "bias": round(float(errors.mean()), 6),
        "outside_limits": sum(not c.within_limits for c in comparisons),
    }


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """All figures: overall, and by preset, kind, latency and stall; a histogram; the worst of each kind."""

    def by(key: Callable[[Comparison], Any]) -> dict[str, Any]:
        groups: dict[str, list[Comparison]] = {}
        for comparison in comparisons:
            groups.setdefault(str(key(comparison)), []).append(comparison)
        return {name: figures(group) for name, group in groups.items()}

    counts, _ = np.histogram([100 * c.error for c in comparisons], bins=[-np.inf, *EDGES_PERCENT, np.inf])
    worst = {}
    for kind in dict.fromkeys(c.kind for c in comparisons):
        w = max((c for c in comparisons if c.kind == kind), key=lambda c: abs(c.error))
        worst[kind] = {
            "case": f"{w.preset} {w.number}",
            "rtl_cycles": w.rtl_cycles,
            "error_cycles": round(w.error_cycles, 2),
            "error": round(w.error, 5),
            "read_latency_cycles": w.read_latency_cycles,
            "stall": w.stall,
        }
    return {
        **figures(comparisons),
        "by_preset": by(lambda c: c.preset),
        "by_kind": by(lambda c: c.kind),
        "by_read_latency_cycles": by(lambda c: c.read_latency_cycles),
        "by_stall": by(lambda c: c.stall),
        "histogram_percent": {"edges": list(EDGES_PERCENT), "counts": counts.tolist()},
        "worst_by_kind": worst,
    }


def within_limits(comparisons: Sequence[Comparison]) -> bool:
    """Whether mean and largest error are as small as they should be."""
    found = figures(comparisons)
    return bool(found["mean_abs_error"] <= MEAN_LIMIT and not found["outside_limits"])


def picture(comparisons: Sequence[Comparison]) -> str:
    """The histogram of errors as SVG, by stall probability."""
    groups: dict[str, list[float]] = {}
    for c in comparisons:
        groups.setdefault(f"stalls {c.stall:g}", []).append(100 * c.error)
    found = figures(comparisons)
    title = f"Cycle model against RTL: {len(comparisons)} cases, mean error {found['mean_abs_error']:.2%}"
    return histogram_svg(dict(sorted(groups.items())), EDGES_PERCENT, title, "error of a case's cycles, percent")


def document(comparisons: Sequence[Comparison]) -> str:
    """The text of the committed result."""
    rows = [asdict(c) for c in comparisons]
    body = json.dumps({"summary": summary(comparisons)}, indent=1)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return body[: body.rindex("\n}")] + f',\n "comparisons": [\n  {lines}\n ]\n}}\n'


def committed(path: Path = RESULT) -> list[Comparison]:
    """The comparisons of the committed result.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["comparisons"]
        return [Comparison(**row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no calibration there ({error}); make it with `plora calibrate --write`") from None


def repredicted(comparisons: Sequence[Comparison]) -> list[tuple[Comparison, float]]:
    """The committed comparisons whose prediction has changed since, with the model's cycles of now."""
    changed = []
    for preset_name in dict.fromkeys(c.preset for c in comparisons):
        wanted = {c.number: c for c in comparisons if c.preset == preset_name}
        for case in cases(preset_name, max(wanted) + 1):
            if case.number not in wanted:
                continue
            now = max(p.completed_cycle for p in predict_stream(stream_of(case), case.timing))
            if abs(now - wanted[case.number].model_cycles) > 1e-2:
                changed.append((wanted[case.number], now))
    return changed
