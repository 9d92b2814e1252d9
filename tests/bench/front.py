"""Figures of the device's front end: turns of queues, bandwidth of core and host, hostile descriptors a second.

python -m tests.bench.front shares --preset small
python -m tests.bench.front turns
python -m tests.bench.front hostile --descriptors 10000000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plora.hw.cosim.device import RtlDevice
from plora.hw.cosim.rings import PACKED_BYTES, RingLoad, enable
from plora.hw.defs.config import VALUE_BYTES, NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, Op
from plora.hw.defs.legality import RingSetup
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.queue import submission_line
from plora.hw.defs.registers import global_offset, queue_offset
from plora.sw.queue_pair import Request
from plora.sw.session import Session, open_session

SHARES = ((0, 0), (256, 0), (64, 0), (64, 4), (64, 1), (256, 1), (32, 0), (16, 16))
"""Bounds of the core's words and of the host's lines on each channel; 0: none."""

WORD_BYTES = 64


@dataclass(frozen=True)
class Share:
    """Bandwidth under one setting, in bytes a cycle of the whole device."""

    core_words: int
    host_lines: int
    core: float
    host: float
    core_alone: float
    """With the same setting and an idle host."""


def _stream(session: Session, config: NdpConfig, rows: int, columns: int) -> Request:
    return Request(
        Descriptor(
            op=Op.GEMV,
            device_address=session.allocator.allocate(
                pack_geometry(config, rows, columns).packed_bytes, "weights"
            ).address,
            device_bytes=pack_geometry(config, rows, columns).packed_bytes,
            device_rows=rows,
            device_columns=columns,
            gpu_bytes=columns * VALUE_BYTES,
            gpu_rows=1,
            gpu_columns=columns,
        ),
        np.zeros((1, columns), np.float16),
    )


def measure_share(config: NdpConfig, core_words: int, host_lines: int, *, stores: bool = False) -> Share:
    """Let the core stream weights while the host loads (or stores) without pause, 64 lines at a time."""
    rows, columns = 32 * config.channels, 1024
    with RtlDevice(config, dram_bytes=1 << 22, host_outstanding=64) as device:
        session = open_session(device, memory_bytes=1 << 22, depth=8)
        session.driver.share(core_words=core_words, host_lines=host_lines)
        request = _stream(session, config, rows, columns)
        words = global_offset("WORDS_READ")
        size = 1 << 14
        data = bytes(size)

        def run(*, host: bool) -> tuple[float, float]:
            session.queue.submit([request] * 8)
            device.wait(600)
            before, begun, moved = device.mmio_read(words), device.cycles, 0
            while device.cycles - begun < 6000:
                if not host:
                    device.wait(500)
                elif stores:
                    device.hdm_write((1 << 22) - size, data)
                    device.hdm_fence()
                else:
                    device.hdm_read((1 << 22) - size, size)
                moved += size if host else 0
                if session.queue.outstanding < 4:
                    session.queue.submit([request] * 4)
                session.queue.poll()
            elapsed = device.cycles - begun
            core = (device.mmio_read(words) - before) * WORD_BYTES / elapsed
            session.queue.drain()
            return core, moved / elapsed

        alone, _ = run(host=False)
        core, host = run(host=True)
    return Share(core_words, host_lines, core, host, alone)


def measure_turns(config: NdpConfig, weights: Sequence[int], *, cycles: int = 6000) -> list[float]:
    """Share of the descriptors served that each queue had, by their weights, while all had more than enough."""
    line = submission_line(Descriptor(type=0), 1)
    window, depth = 1 << 21, 512
    with RtlDevice(config, dram_bytes=window * len(weights), read_latency_cycles=4) as device:
        setups = []
        for queue, weight in enumerate(weights):
            base = queue * window
            setups.append(RingSetup(base, base + window, depth, base, 11, base + (1 << 20), 11))
            load = RingLoad(queue, setups[-1], 1, np.zeros((0, PACKED_BYTES), np.uint8))
            assert enable(device, load, weight=weight)
        for setup in setups:
            for slot in range(depth):
                device.poke(setup.submission_base + (slot << 11), line)
        for queue in range(len(weights)):
            device.mmio_write(queue_offset(queue, "DOORBELL"), 1)
        device.wait(cycles)
        served = [device.mmio_read(queue_offset(queue, "SQ_HEAD")) for queue in range(len(weights))]
    assert max(served) < depth, "a queue ran out of descriptors"
    return [count / sum(served) for count in served]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shares", "turns", "hostile"))
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--descriptors", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    config = preset(args.preset)
    if args.what == "shares":
        peak = config.channels * WORD_BYTES
        print(f"{config.name}: bytes a cycle, of {peak} that memory has")
        print("core words | host lines | core | host loads | core alone | core beside stores | host stores")
        for core_words, host_lines in SHARES:
            loads = measure_share(config, core_words, host_lines)
            stores = measure_share(config, core_words, host_lines, stores=True)
            print(
                f"{core_words:10} | {host_lines:10} | {loads.core:4.0f} | {loads.host:10.1f} | {loads.core_alone:10.0f}"
                f" | {stores.core:18.0f} | {stores.host:11.1f}"
            )
    elif args.what == "turns":
        for weights in ((1, 1), (3, 1), (1, 7), (255, 1)):
            shares = measure_turns(config, weights)
            print(f"weights {weights}: shares {', '.join(f'{share:.3f}' for share in shares)}")
    else:
        from tests.hw.rtl.front.hostile import run
        from tests.hw.rtl.front.test_hostile import front_end, report

        with front_end(config) as device:
            tally = run(device, config, descriptors=args.descriptors, a_round=20_000, seed=args.seed, executes=False)
        report("front end", tally)


if __name__ == "__main__":
    main()
