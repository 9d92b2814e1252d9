"""Rates of the host software and of the functional device: `python -m tests.bench.host`.

CPU time of one process, the best of a few rounds, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from plora.hw.defs.config import preset
from plora.sim.functional import FunctionalDevice
from plora.sim.functional.layout import pack_operand, unpack_operand
from plora.sim.golden.numerics import golden_gemm
from plora.sw.matrix import store_matrix
from plora.sw.queue_pair import Request
from plora.sw.session import open_session
from plora.sw.tiling import full_slots, lay_out, plan_gemm, plan_lora


def best_s(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of the fastest of ``rounds`` calls."""
    times = []
    for _ in range(rounds):
        start = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - start)
    return max(min(times), 1) / 1e9


def measure(rounds: int = 5, descriptors: int = 1000) -> dict[str, float]:
    """Return every rate by name; the unit ends the name."""
    random = np.random.default_rng(0)
    rates: dict[str, float] = {}

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float16)

    full = preset("full")
    for n, k in ((64, 4096), (4096, 64), (4096, 8)):
        w = matrix(n, k)
        packed = pack_operand(w, full)
        rates[f"pack {n} x {k}, MB/s"] = w.nbytes / 1e6 / best_s(partial(pack_operand, w, full), rounds)
        seconds = best_s(partial(unpack_operand, packed, full, n, k), rounds)
        rates[f"unpack {n} x {k}, MB/s"] = w.nbytes / 1e6 / seconds
    for n, k, b in ((64, 4096, 1), (64, 4096, 32), (4096, 64, 32)):
        w, x = matrix(n, k), matrix(b, k)
        seconds = best_s(partial(golden_gemm, x, w, full.accumulator), rounds)
        rates[f"golden {n} x {k}, batch {b}, million multiply-adds/s"] = n * k * b / 1e6 / seconds
    for n, k in ((8, 64), (64, 4096)):
        rates[f"descriptors through driver and functional device, {n} x {k}, 1/s"] = _descriptor_rate(
            matrix(n, k), matrix(1, k), max(1, descriptors * 64 // k), rounds
        )

    def plan() -> int:
        a, b = lay_out(full, 64, 4096), lay_out(full, 4096, 64)
        return sum(len(chain) for _ in range(20) for chain in plan_lora(a, 0, b, 1 << 20, 256, full_slots(full)))

    rates["descriptors planned, 1/s"] = plan() / best_s(plan, rounds)
    return rates


def _descriptor_rate(w: np.ndarray, x: np.ndarray, count: int, rounds: int) -> float:
    config = preset("full")
    device = FunctionalDevice(config)
    session = open_session(device, memory_bytes=device.memory.size_bytes, depth=64)
    placed = store_matrix(session.driver, session.allocator, w, "w")
    ((step,),) = plan_gemm(placed.layout, placed.region.address, 1, full_slots(config))
    requests = [[Request(step.descriptor, x)] for _ in range(count)]
    return count / best_s(lambda: sum(1 for _ in session.queue.run(requests)), rounds)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, rate in measure().items():
        print(f"{rate:12,.0f}  {name}")
