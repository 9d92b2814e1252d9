"""How good the manager's choices are, and how long they take.

    python -m tests.bench.manager

Choices against the best of all combinations, on random batches of 2 to 6 adapters with little to ample
HBM; decisions of a batch out of 1000 adapters from which one request leaves and to which one comes at every
step, beside the decode step that they are about (Llama2-7B, one H100, four devices, context 400).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plora.sim.manager.cost import AttentionCost, Composition, CostModel, GroupCost, Rates
from plora.sim.manager.online import Manager
from plora.sim.manager.select import Problem, exhaustive, select
from plora.sim.serving.decoding import DECISION_US
from plora.sim.serving.steps import StepTimer
from plora.sim.system.clock import PS_PER_US
from plora.sim.system.config import RunOptions, resolve
from plora.sim.system.decide import AttentionModel, cost_model
from plora.sim.system.decode import TYPICAL_RANK
from plora.sim.system.fastwave import Wave
from plora.sim.system.spec import STRATEGIES

COMPOSITIONS: tuple[Composition, ...] = ("dependency", "overlap", "additive")
CONTEXT = 400

D, WIDE = 4096, 11008
# Llama2-7B on an H100 with four devices behind CXL 3.1, in nanoseconds.
RATES = Rates(1 / 3350, 1 / 989.4e3, 1 / 1100, 1 / 2.048e3, 1 / 96, 1 / 108, 0.27 / 128, 0.09 / 128, 128.0, 1000.0)
GROUPS = [
    GroupCost(32, 30_000.0, D, 3 * D, 3 * D, 3, 384.0),
    GroupCost(32, 10_000.0, D, D, D, 1, 128.0),
    GroupCost(32, 54_000.0, D, 2 * D, 2 * WIDE, 2, 256.0),
    GroupCost(32, 27_000.0, WIDE, WIDE, D, 1, 256.0),
]
RANKS = [8, 16, 32, 64, 128]


def problem(
    rng: np.random.Generator,
    count: int,
    composition: Composition = "dependency",
    allowed: tuple[int, ...] = (0, 1, 2, 3),
) -> Problem:
    """Return a random batch: few or many rows an adapter, short or long contexts, no, little or ample HBM."""
    model = CostModel(GROUPS, RATES, 4, composition)
    rows = rng.integers(1, int(rng.choice([3, 64])), count)
    ranks = rng.choice(RANKS, count)
    requests, context = int(rows.sum()), int(rng.integers(100, 4000))
    layer = requests * context * 4.0 * D
    attention = AttentionCost(
        layers=32,
        near_base=0.0,
        near_slope=layer / 3350,
        far_base=1000.0,
        far_device=layer / 4400,
        far_up=0.0,
        down=requests * 2 * D / 128,
        up=4 * requests * (2 * D + 256) / 128,
        kv_bytes=layer * 32,
        copies=True,
    )
    cached = float((ranks * model.cached_per_rank[0]).sum())
    budget = rng.uniform(0, 1.3) * cached + rng.integers(0, 2) * rng.uniform(0, 1) * attention.kv_bytes
    return Problem(model, rows, ranks, rng.integers(0, 4, count), allowed, attention, float(budget))


def gaps(composition: Composition, cases: int, seed: int = 1) -> np.ndarray:
    """Return by how much each decision is slower than the optimum, relative (cases,)."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(cases):
        asked = problem(rng, int(rng.integers(2, 7)), composition)
        found.append(select(asked).time / exhaustive(asked).time - 1)
    return np.array(found)


@dataclass(frozen=True)
class Latency:
    """Processor time of decisions a step in microseconds, and the step that they are about in milliseconds."""

    batch: int
    decision_us: float
    step_ms: float

    @property
    def share(self) -> float:
        """Decision over step."""
        return self.decision_us / self.step_ms * 1e-3


def latency(batch: int, steps: int = 400, adapters: int = 1000) -> Latency:
    """Measure a manager whose batch changes by two requests at every step; the fastest of four blocks counts."""
    resolved = resolve(RunOptions(num_adapters=adapters))
    spec = resolved.systems[0]
    timer = StepTimer(resolved, spec)
    machine = timer.machine
    ranks, devices = resolved.source.adapter_ranks(0), np.arange(adapters) % machine.far_devices
    model = cost_model(timer.setting(min(batch, 64)), "dependency", TYPICAL_RANK)
    budget, cost_ps = machine.hbm_budget_bytes - 13.5e9, DECISION_US * PS_PER_US
    manager = Manager(model, ranks, devices, range(len(STRATEGIES)), budget, decision_time=cost_ps)
    rng = np.random.default_rng(0)
    present = rng.integers(0, adapters, batch).tolist()
    cost = AttentionModel(timer.setting(1)).cost(batch, batch * CONTEXT, float(batch * CONTEXT))
    manager.step(present, [], cost)

    def block() -> float:
        places, coming = rng.integers(0, batch, steps).tolist(), rng.integers(0, adapters, steps).tolist()
        start = time.process_time()
        for place, new in zip(places, coming, strict=True):
            old, present[place] = present[place], new
            manager.step([new], [old], cost)
        return (time.process_time() - start) / steps

    block()
    best = min(block() for _ in range(4))
    ids = manager.serving()
    wave = Wave(manager.rows[ids], ranks[ids], devices[ids], manager.strategies[ids])
    contexts = np.full(batch, CONTEXT)
    change = manager.step([], [], cost)
    step = timer.decode_ps(contexts, np.floor(contexts * change.kv_share).astype(np.int64), wave, 1)
    return Latency(batch, best * 1e6, float(step[0]) * 1e-9)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=400, help="random batches for each composition (default: 400)")
    parser.add_argument("--steps", type=int, default=400, help="steps of a block (default: 400)")
    args = parser.parse_args(arguments)
    print("| composition | cases | within 2 % | the optimum itself | worst |\n|---|---|---|---|---|")
    for composition in COMPOSITIONS:
        found = gaps(composition, args.cases)
        within, exact = (found < 0.02).mean(), (found < 1e-9).mean()
        print(f"| {composition} | {len(found)} | {within:.1%} | {exact:.1%} | {found.max():.2%} |")
    print("\n| batch | decisions us a step | step ms | share |\n|---|---|---|---|")
    for batch in (32, 64, 128, 256, 512):
        one = latency(batch, args.steps)
        print(f"| {one.batch} | {one.decision_us:.0f} | {one.step_ms:.2f} | {one.share:.2%} |")


if __name__ == "__main__":
    main()
