"""A recorded vLLM run beside this simulator: ``metric | real | simulated | difference``.

    python -m plora.sim.serving.validation RUN.vllm_requests.jsonl [--async-scheduling]

The run is vLLM 0.19 with Qwen3-30B-A3B on two RTX PRO 6000: two data-parallel replicas that share their
experts. The GPU is its data sheet with kernel corrections measured on an H100; one number is calibrated
to this run, the rate at which the two GPUs exchange tokens (`pcie5-x16-staged` in links.toml), by its
mean TPOT. What the run's metadata does not state is off; ``--async-scheduling`` schedules a step while
the one before runs, as this version of vLLM does unless told otherwise.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.serving.metrics import summary
from plora.sim.serving.options import ServeOptions
from plora.sim.serving.simulate import Simulation
from plora.sim.system.config import RunOptions, resolve

RUN = RunOptions(systems=("all-hbm",), model="qwen3-30b-a3b", gpu="rtx-pro-6000", num_adapters=0)
SERVING = ServeOptions(max_num_seqs=128, max_num_batched_tokens=2048, data_parallel_size=2, enable_expert_parallel=True)
"""What the run's metadata file states."""


@dataclass(frozen=True)
class Row:
    """One metric, and what the comparison rests on."""

    metric: str
    real: float
    simulated: float
    note: str = ""

    @property
    def difference(self) -> float:
        """Relative difference of the simulated figure."""
        return self.simulated / self.real - 1


def compare(path: Path, *, async_scheduling: bool = False) -> list[Row]:
    """Return the metrics of the recorded run `path` beside those of its simulation.

    Raises:
        UserError: a file that is no recorded run.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        names = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "output_toks")
        arrival, queued, scheduled, first, last, output = (np.array([row[n] for row in rows]) for n in names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no recorded run ({error!r}); give a file of requests with time stamps") from None
    real_tpot = (last - first) / (output - 1)
    # Arrivals are by another clock than the rest; the first request was queued as it arrived.
    waited = (queued - queued[0]) - (arrival - arrival[0])
    resolved = resolve(RunOptions(**{n: getattr(RUN, n) for n in RUN.__struct_fields__} | {"workload": str(path)}))
    requests = resolved.source.requests(len(rows), resolved.options.seed)
    serving = msgspec.structs.replace(SERVING, async_scheduling=async_scheduling)
    outcome = Simulation(resolved, resolved.systems[0], serving, requests).run()
    found = summary(requests, outcome, serving)
    prompt = float((outcome.first_token_ps - outcome.admitted_ps).mean()) * 1e-9
    duration = float(last.max() - queued[0])
    return [
        Row("TPOT mean (ms)", float(real_tpot.mean()) * 1e3, found["tpot_ms"]["mean"], "calibrated"),
        Row("TPOT p99 (ms)", _p99(real_tpot) * 1e3, found["tpot_ms"]["p99"]),
        Row("TTFT mean (ms), from the engine's queue", float((first - queued).mean()) * 1e3, found["ttft_ms"]["mean"]),
        Row("TTFT mean (ms), from arrival", float((first - queued + waited).mean()) * 1e3, found["ttft_ms"]["mean"]),
        Row("TTFT p99 (ms)", _p99(first - queued) * 1e3, found["ttft_ms"]["p99"]),
        Row(
            "waiting for a seat, mean (ms)",
            float((scheduled - queued + waited).mean()) * 1e3,
            found["queueing_ms"]["mean"],
        ),
        Row("prompt, mean (ms)", float((first - scheduled).mean()) * 1e3, prompt),
        Row("end to end, mean (s)", float((last - queued + waited).mean()), found["e2e_ms"]["mean"] * 1e-3),
        Row("tokens per second", float(output.sum()) / duration, found["throughput_tokens_per_s"]),
        Row("duration (s)", duration, found["duration_s"]),
    ]


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99, method="inverted_cdf"))


def table(rows: list[Row]) -> str:
    """Return `rows` as a Markdown table."""
    lines = ["| metric | real | simulated | difference | |", "|---|---|---|---|---|"]
    lines += [f"| {r.metric} | {r.real:.4g} | {r.simulated:.4g} | {r.difference:+.1%} | {r.note} |" for r in rows]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table for the file named in `arguments`."""
    ahead = "--async-scheduling"
    files = [argument for argument in arguments if argument != ahead]
    if len(files) != 1:
        print(f"usage: python -m plora.sim.serving.validation RUN.vllm_requests.jsonl [{ahead}]", file=sys.stderr)
        return 2
    try:
        print(table(compare(Path(files[0]), async_scheduling=ahead in arguments)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
