"""How many descriptors a second the models take, and how that compares with the RTL under Verilator.

    python -m tests.bench.device_rates [--rtl] [--json]

Rates are of one core, in processor time, the best of several runs: what else the machine does costs less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import Op
from plora.sim.core.closed import alone
from plora.sim.core.demand import Demand, Demands, Shapes, demands
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.kernel import NEVER, DeviceKernel, RingPlace

CORE_DESCRIPTORS = 1_000_000
DEVICE_DESCRIPTORS = 40_000
QUEUES, DEPTH, BATCH = 8, 1024, 256
REPEATS = 5

MIXES: dict[str, tuple[int, int]] = {
    "ranks 8 ... 128, K 4096": (128, 4096),
    "small: N to 64, K to 512": (64, 512),
}
"""Largest N and K of the descriptors."""


def random_shapes(config: NdpConfig, count: int, rows: int, columns: int, *, fixed_columns: bool = False) -> Shapes:
    """Random GEMV and GEMM of up to four rows; with ``fixed_columns`` ranks of adapters on one K."""
    rng = np.random.default_rng(1)
    zero = np.zeros(count, np.int64)
    batch = rng.integers(1, 5, count)
    n = rng.choice([8, 16, 32, 64, 128], count) if fixed_columns else rng.integers(1, rows + 1, count)
    return Shapes(
        op=np.where(batch == 1, int(Op.GEMV), int(Op.GEMM)),
        device_rows=n,
        device_columns=np.full(count, columns) if fixed_columns else rng.integers(1, columns + 1, count),
        gpu_rows=batch,
        source=zero,
        keep=zero,
        acc_in=zero,
        acc_out=zero,
        transpose=zero,
        dtype=zero,
        device_bytes=zero,
        device_stripe=rng.integers(0, 1 << 20, count),
        operand_stripe=rng.integers(0, 1 << 20, count),
        result_line=rng.integers(0, 1 << 20, count),
    )


def rate(work: Callable[[], int]) -> float:
    """Descriptors a second of ``work``, which returns how many it did: the best of `REPEATS` runs."""
    best = 0.0
    for _ in range(REPEATS):
        start = time.process_time()
        count = work()
        best = max(best, count / (time.process_time() - start))
    return best


def core_rate() -> float:
    """The closed form, from shapes to cycles."""
    config = preset("full")
    shapes = random_shapes(config, CORE_DESCRIPTORS, 128, 4096)

    def work() -> int:
        # In pieces that stay in the processor's caches.
        piece, total = 16_384, 0
        for start in range(0, CORE_DESCRIPTORS, piece):
            part = Shapes(**{name: getattr(shapes, name)[start : start + piece] for name in Shapes.__annotations__})
            total += len(alone(config, demands(config, part), MemoryTiming()).cycles)
        return total

    return rate(work)


def device_work(mix: str, timing: MemoryTiming) -> Callable[[], int]:
    """Eight queues, each kept filled, and the host loading and storing lines all the while."""
    config = preset("full")
    rows, columns = MIXES[mix]
    all_demands = demands(
        config, random_shapes(config, DEVICE_DESCRIPTORS, rows, columns, fixed_columns=mix.startswith("ranks"))
    )

    def work() -> int:
        kernel = DeviceKernel(config, timing, poll_interval_cycles=NEVER)
        for queue in range(QUEUES):
            kernel.enable(queue, RingPlace(DEPTH, queue << 24, 1 << 10, (queue << 24) + (1 << 23), 1 << 8), 0)
        published, taken, cycle, given = [0] * QUEUES, [0] * QUEUES, 0.0, 0
        while sum(taken) < DEVICE_DESCRIPTORS:
            for queue in range(QUEUES):
                room = min(DEPTH - (published[queue] - taken[queue]), BATCH, DEVICE_DESCRIPTORS - given)
                if room >= min(BATCH, DEVICE_DESCRIPTORS - given) > 0:
                    part = Demands(
                        **{name: getattr(all_demands, name)[given : given + room] for name in Demand._fields}
                    )
                    kernel.publish(queue, published[queue], part, published=cycle, tag=given)
                    kernel.ring_doorbell(queue, cycle)
                    published[queue] += room
                    given += room
            for line in range(64):
                kernel.store_line(line, cycle)
            cycle += 50_000
            kernel.advance(cycle)
            done = kernel.completions()
            for queue in range(QUEUES):
                own = int((done["queue"] == queue).sum())
                if own:
                    taken[queue] += own
                    kernel.take(queue, taken[queue], cycle)
        return DEVICE_DESCRIPTORS

    return work


def rtl_rate(config_name: str, count: int = 40) -> dict[str, float]:
    """The RTL on the small mix: descriptors and cycles a second, and the model's on the same stream."""
    from plora.hw.cosim.device import RtlDevice
    from plora.sim.device.predict import predict_stream
    from plora.sim.device.stream import lines_of, place
    from plora.sw.stream_run import run_stream

    config = preset(config_name)
    rng = np.random.default_rng(2)
    rows = [
        {"device_rows": int(rng.integers(1, 65)), "device_columns": int(rng.integers(1, 513))} for _ in range(count)
    ]
    stream = place(config, lines_of(rows))
    with RtlDevice(config, dram_bytes=min(1 << config.dpa_bits, 1 << 28)) as device:
        start = time.process_time()
        run = run_stream(stream, device, load=False)
        seconds = time.process_time() - start
    predict_stream(stream, MemoryTiming())
    return {
        "rtl_descriptors_per_s": count / seconds,
        "rtl_cycles_per_s": run.simulated_cycles / seconds,
        "cycles_per_descriptor": run.total_cycles / count,
    }


def measure(*, rtl: bool) -> dict[str, Any]:
    """All rates."""
    result: dict[str, Any] = {"core_model_descriptors_per_s": round(core_rate())}
    for mix in MIXES:
        for stall in (0.0, 0.1):
            key = f"device model, {mix}, stall {stall:g}"
            result[key] = round(rate(device_work(mix, MemoryTiming(stall=stall))))
    if rtl:
        found = rtl_rate("small")
        result |= {key: round(value) for key, value in found.items()}
        result["model_to_rtl"] = round(
            result["device model, small: N to 64, K to 512, stall 0"] / found["rtl_descriptors_per_s"]
        )
    return result


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtl", action="store_true", help="the RTL of `small` as well")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    result = measure(rtl=args.rtl)
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:55} {value:>12,}")


if __name__ == "__main__":
    main()
