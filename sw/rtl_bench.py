"""Speed of the RTL by its own counters, read through registers, held against what bounds it.

`plora rtl bench` and the tests of the core's speed share the cases (`plora.sw.rtl_cases`) and this measurement.

==========================  ===========================================================================
*of one job alone*
cycles                      register SPAN: from first to last beat, summed over the job's descriptors
useful beat fraction        register BEATS / SPAN; a beat is one stripe of the device operand multiplied
multiply-add utilisation    multiply-adds that count (B x N x K) / (multiply-add units x SPAN)
useful share                multiply-adds that count / those of all beats: below 1 with remainders and
                            where one input row uses half of the array
*of equal jobs in a row, all queued at once*
period                      cycles from one completion to the next, in the steady state
bound                       cycles that the busiest resource needs for a job: memory (words of operands and
                            result that a channel moves), array (a beat a cycle), drain (row groups x
                            pairs x cycles of a drain) or result port (a line a cycle)
gap                         period - bound
==========================  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.descriptor import Keep, Op
from plora.hw.defs.status import Status
from plora.sim.core.closed import hides_latency, pass_cycles
from plora.sim.core.demand import Demands
from plora.sim.device.predict import stream_demands
from plora.sw.rtl_cases import GAP_LIMIT_CYCLES, BenchCase, Criterion
from plora.sw.stream_run import SimulatedDevice, StreamRun, differences, run_stream

_READ_AHEAD_JOBS = 4
"""Jobs at the end of a row that have nothing to read ahead: the row's steady state ends before them."""

Open = Callable[[BenchCase], AbstractContextManager[SimulatedDevice]]
"""Gives a device, fresh from reset, with the memory of a case."""


@dataclass(frozen=True)
class Check:
    """One expectation of a case."""

    what: str
    measured: float
    limit: float
    at_most: bool = False

    @property
    def passed(self) -> bool:
        """Whether it is met."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


@dataclass(frozen=True)
class Alone:
    """One job alone."""

    cycles: int
    useful_beat_fraction: float
    multiply_add_utilisation: float
    useful_share: float
    exps_needed: float | None
    """Exponentials a cycle that an array of a beat a cycle asks of the softmax; None for other operations."""
    exps_delivered: float | None
    """Those a cycle that there were."""


@dataclass(frozen=True)
class InARow:
    """A job in a row of equal ones."""

    period_cycles: float
    bound_cycles: float

    @property
    def gap_cycles(self) -> float:
        """Cycles a job in which not even the resource that is the bound works."""
        return self.period_cycles - self.bound_cycles


@dataclass(frozen=True)
class Measurement:
    """What a case gave."""

    case: BenchCase
    bound: str
    """The resource that is busiest with the case's jobs."""
    alone: Alone
    in_a_row: InARow | None
    checks: tuple[Check, ...]
    """None where memory is the bound and the device is too small to keep it busy."""
    faults: tuple[str, ...]
    """Results that are not those of the functional device, and counters that contradict each other."""
    simulated_cycles: int

    @property
    def passed(self) -> bool:
        """Whether all expectations are met."""
        return not self.faults and all(check.passed for check in self.checks)


def job_bounds(config: NdpConfig, demands: Demands) -> dict[str, float]:
    """Cycles that each resource needs for the descriptors, one after the other."""
    passes, drain = demands.groups * demands.pairs, pass_cycles(demands)
    lines = float(np.sum(demands.lines))
    return {
        "memory": float(np.sum(demands.stripes + demands.operand_stripes)) + lines / config.channels,
        "array": float(np.sum(demands.total_beats + demands.scale_cycles)),
        "drain": float(np.sum(np.where(drain > demands.group_cycles, passes * drain, 0))),
        "result port": lines,
    }


def period(ends: Sequence[int]) -> float:
    """Cycles from job to job, where the first and the last jobs of a row do not count.

    The first have nothing read ahead for them, and at the end nothing is left to read ahead: between two jobs in
    the middle, as much is done as is finished.
    """
    first, last = 3, len(ends) - 1 - _READ_AHEAD_JOBS
    if last - first < 2:
        first, last = 0, len(ends) - 1
    return (ends[last] - ends[first]) / (last - first)


def measure(case: BenchCase, config: NdpConfig, open_device: Open) -> Measurement:
    """Run a case and judge it.

    Raises:
        UserError: the device did not complete everything in time.
    """
    run, demands, faults = _run(case, config, 1, open_device)
    simulated = run.simulated_cycles
    span, beats = run.counters["SPAN"], run.counters["BEATS"]
    work = int(np.sum(demands.multiply_adds))
    alone = Alone(
        cycles=span,
        useful_beat_fraction=beats / span,
        multiply_add_utilisation=work / (config.multiply_adds * span),
        useful_share=work / (config.multiply_adds * beats),
        **_exps(run, demands),
    )
    bounds = job_bounds(config, demands)
    bound = max(bounds, key=lambda name: bounds[name])
    in_a_row = None
    if case.jobs > 1:
        run, _, more = _run(case, config, case.jobs, open_device)
        faults += more
        simulated += run.simulated_cycles
        # A job ends with its result. The last of those in turns has nothing between it and the one before.
        ends = [done.completed_cycle for done in run.finished if done.entry.descriptor.keep == Keep.NONE]
        ends = ends[:-1] if case.in_turns else ends
        in_a_row = InARow(period(ends), bounds[bound])
    judged = bound != "memory" or hides_latency(config, case.timing)
    checks = tuple(_checks(case, bound, alone, in_a_row)) if judged else ()
    return Measurement(case, bound, alone, in_a_row, checks, tuple(faults), simulated)


def _exps(run: StreamRun, demands: Demands) -> dict[str, float | None]:
    """Exponentials a cycle of the first to the last beat of the descriptors that make them."""
    softmax = [done.entry.descriptor.op == Op.SOFTMAX for done in run.finished]
    if not any(softmax):
        return {"exps_needed": None, "exps_delivered": None}
    made = [done.entry.descriptor for done, own in zip(run.finished, softmax, strict=True) if own]
    exps = sum(d.gpu_rows * d.device_rows for d in made)
    beats = int(np.sum(demands.total_beats[softmax]))
    cycles = sum(done.cycles for done, own in zip(run.finished, softmax, strict=True) if own)
    return {"exps_needed": exps / beats, "exps_delivered": exps / cycles}


def _run(case: BenchCase, config: NdpConfig, jobs: int, open_device: Open) -> tuple[StreamRun, Demands, list[str]]:
    stream = case.stream(config, jobs)
    with open_device(case) as device:
        run = run_stream(stream, device)
        faults = list(differences(stream, device))
    faults += [
        f"line {done.entry.line}: refused, {Status(done.status).name}"
        for done in run.finished
        if done.status != Status.OK
    ]
    demands = stream_demands(stream, [Status.OK] * len(stream.entries))
    counters = run.counters
    expected = {
        "BEATS": int(np.sum(demands.total_beats)),
        # Every word is read from memory once.
        "WORDS_READ": config.channels * int(np.sum(demands.stripes + demands.operand_stripes)),
        "WORDS_WRITTEN": int(np.sum(demands.lines)),
    }
    faults += [
        f"{name} is {counters[name]}, not {value}" for name, value in expected.items() if counters[name] != value
    ]
    if counters["SPAN"] != counters["BEATS"] + counters["STALL_WEIGHTS"] + counters["STALL_DRAIN"]:
        faults.append(f"SPAN is not BEATS and stalls: {counters}")
    return run, demands, faults


def _checks(case: BenchCase, bound: str, alone: Alone, in_a_row: InARow | None) -> list[Check]:
    checks = []
    if case.criterion is Criterion.BEATS:
        checks.append(Check(case.criterion, alone.useful_beat_fraction, case.required))
    elif case.criterion is Criterion.UTILISATION:
        checks.append(Check(case.criterion, alone.multiply_add_utilisation, case.required * alone.useful_share))
    if alone.exps_needed is not None and alone.exps_delivered is not None:
        checks.append(Check("softmax keeps up", alone.exps_delivered / alone.exps_needed, case.required))
    if in_a_row is None:
        return checks
    if case.criterion is Criterion.BOUND or (alone.exps_needed is not None and bound == "memory"):
        checks.append(Check(Criterion.BOUND, in_a_row.bound_cycles / in_a_row.period_cycles, case.required))
    # The second product of a chain waits for the first, whatever was read ahead, unless another comes between.
    if (len(case.rows) == 1 or case.in_turns) and bound in ("memory", "array"):
        limit = GAP_LIMIT_CYCLES * len(case.rows)
        checks.append(Check("gap in cycles", in_a_row.gap_cycles, limit, at_most=True))
    return checks


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def as_row(found: Measurement) -> dict[str, Any]:
    """The measurement for a JSON document."""
    case, alone, row = found.case, found.alone, found.in_a_row
    return {
        "case": case.name,
        "operation": case.operation,
        "shape": case.shape,
        "dtype": case.dtype,
        "stall": case.timing.stall,
        "cycles": alone.cycles,
        "useful_beat_fraction": round(alone.useful_beat_fraction, 5),
        "multiply_add_utilisation": round(alone.multiply_add_utilisation, 5),
        "useful_share": round(alone.useful_share, 5),
        "exps_per_cycle_needed": _rounded(alone.exps_needed),
        "exps_per_cycle_delivered": _rounded(alone.exps_delivered),
        "jobs_in_a_row": case.jobs,
        "period_cycles": round(row.period_cycles, 2) if row else None,
        "bound": found.bound,
        "bound_cycles": round(row.bound_cycles, 2) if row else None,
        "gap_cycles": round(row.gap_cycles, 2) if row else None,
        "checks": [
            {
                "what": str(check.what),
                "measured": round(check.measured, 5),
                "at_most" if check.at_most else "at_least": round(check.limit, 5),
                "pass": check.passed,
            }
            for check in found.checks
        ],
        "faults": list(found.faults),
        "pass": found.passed,
    }
