"""The core inside the Verilated device: many descriptors, any memory, at hundreds of thousands of cycles a second.

Submission slots are filled through the back door of memory, all before the doorbell rings, so that the
core is never short of descriptors for longer than the front end takes to fetch one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import NdpConfig
from plora.hw.defs.descriptor import Descriptor, DType, Source
from plora.hw.defs.legality import ChainState, QueueWindow, check
from plora.hw.defs.packing import expansion_log2
from plora.hw.defs.queue import (
    LINE_BYTES,
    RESULT_OFFSET,
    Completion,
    operand_offset,
    softmax_scale,
    submission_line,
    valid_word,
)
from plora.hw.defs.registers import GLOBAL, global_offset, queue_offset
from plora.hw.defs.status import Status
from plora.sim.functional.core import FunctionalCore, Outcome
from plora.sim.functional.layout import gpu_operand_bytes
from plora.sim.functional.memory import SparseMemory
from tests.hw.rtl.core.bench import describe, legal_descriptor, mutate, random_exponents
from tests.hw.rtl.core.system import Step, as_bf16, packed_with_poison, random_integers, random_values

QUEUE = 0
PASS = 5
POISON = 0xFF
SLOT_LOG2 = 14
"""Slots as large as the buffers of `tiny` can use."""


@dataclass
class Report:
    """What a run gave: completions in order, and the counters it left."""

    completions: list[Completion]
    counters: dict[str, int]
    busy_cycles: int
    """From the doorbell to the last completion, to the cycle where nothing is compared."""


@dataclass(frozen=True)
class Place:
    """Where a step's data lies."""

    operand: int
    weights: int
    result: int


class Rig:
    """One queue of one device; every `run` starts with a fresh ring and poisoned slots."""

    def __init__(self, device: RtlDevice, *, slot_log2: int = SLOT_LOG2) -> None:
        self.device = device
        self.config: NdpConfig = device.config
        self.slot_bytes = 1 << slot_log2
        self.slot_log2 = slot_log2
        self.memory_bytes = len(device.memory)
        self.window = QueueWindow(0, self.memory_bytes, self.slot_bytes, self.slot_bytes)

    def run(
        self,
        steps: list[Step],
        *,
        compare: bool = True,
        errors: Sequence[tuple[int, str, int]] = (),
        deadline_cycles: int = 200_000,
    ) -> Report:
        """Run ``steps`` in one ring, compare everything with the functional core, and report.

        Each of ``errors`` lets memory fail one byte: number of the step, field of `Place`, offset in bytes.
        """
        expected, descriptors = self.start(steps, errors=errors, compare=compare)
        # Only rates need the cycle; looking costs more than simulating.
        busy = self._wait(len(steps), 16 if compare else 1, deadline_cycles)
        report = self._report(len(steps), busy)
        self.device.mmio_write(queue_offset(QUEUE, "CTRL"), 0)
        self.device.clear_errors()
        if compare:
            self._compare(steps, descriptors, report.completions, expected)
        return report

    def start(
        self, steps: list[Step], *, errors: Sequence[tuple[int, str, int]] = (), compare: bool = True
    ) -> tuple[SparseMemory, list[Descriptor]]:
        """Fill a ring with ``steps`` and ring the doorbell. Returns memory as it was, and the descriptors."""
        device, config = self.device, self.config
        depth = max(2, len(steps))
        device.memory[:] = POISON
        self._submission = submission = self.slot_bytes
        self._results = results = submission + depth * self.slot_bytes
        weights = results + depth * self.slot_bytes + 3 * config.stripe_bytes
        descriptors: list[Descriptor] = []
        places: list[Place] = []
        for index, step in enumerate(steps):
            d = step.descriptor
            slot = submission + index * self.slot_bytes
            if step.x is not None:
                device.poke(slot + operand_offset(config), gpu_operand_bytes(step.x, config))
            if step.w is not None:
                data = packed_with_poison(step, config)
                device.poke(weights, data)
                d = Descriptor(**{**d.__dict__, "device_address": weights})
                weights += (len(data) + 2 * config.stripe_bytes) // config.stripe_bytes * config.stripe_bytes
            assert weights <= self.memory_bytes, "the steps do not fit the rig's memory"
            descriptors.append(d)
            result = results + index * self.slot_bytes + RESULT_OFFSET
            places.append(Place(slot + operand_offset(config), d.device_address, result))
            device.poke(slot, submission_line(d, PASS, step.scale, step.exponents))
        before = SparseMemory(self.memory_bytes)
        if compare:
            before.write(0, device.memory.tobytes())
        for index, field_name, offset in errors:
            address = getattr(places[index], field_name) + offset
            device.inject_error(address, 1)
            before.add_error_range(address, 1)
        self._enable(depth, submission, results)
        device.mmio_write(global_offset("CONTROL"), 1)
        self._started = device.cycles
        device.mmio_write(queue_offset(QUEUE, "DOORBELL"), 1)
        return before, descriptors

    def _wait(self, count: int, step_cycles: int, deadline_cycles: int) -> int:
        device = self.device
        last = self._results + (count - 1) * self.slot_bytes + LINE_BYTES - 4
        while device.peek(last, 4) != valid_word(PASS).to_bytes(4, "little"):
            device.wait(step_cycles)
            assert device.cycles - self._started < deadline_cycles, (
                f"not finished after {deadline_cycles} cycles:"
                f" {device.mmio_read(queue_offset(QUEUE, 'CQ_TAIL'))} of {count} completions"
            )
        return device.cycles - self._started

    def _report(self, count: int, busy: int) -> Report:
        device = self.device
        device.wait(100)
        counters = {r.name: device.mmio_read(r.offset) for r in GLOBAL if 0x40 <= r.offset < 0x80}
        completions = [
            Completion.unpack(device.peek(self._results + index * self.slot_bytes, LINE_BYTES))
            for index in range(count)
        ]
        assert device.mmio_read(global_offset("STATUS")) == 0, "the device does not say that it is idle"
        return Report(completions, counters, busy)

    def _enable(self, depth: int, submission: int, results: int) -> None:
        values = {
            "DEPTH": depth,
            "BASE_LO": 0,
            "BASE_HI": 0,
            "LIMIT_LO": self.memory_bytes & 0xFFFFFFFF,
            "LIMIT_HI": self.memory_bytes >> 32,
            "SQ_BASE_LO": submission,
            "SQ_BASE_HI": 0,
            "CQ_BASE_LO": results,
            "CQ_BASE_HI": 0,
            "SLOTS": self.slot_log2 | self.slot_log2 << 8,
            "PASS": PASS,
        }
        for name, value in values.items():
            self.device.mmio_write(queue_offset(QUEUE, name), value)
        self.device.mmio_write(queue_offset(QUEUE, "CTRL"), 1)
        assert self.device.mmio_read(queue_offset(QUEUE, "QSTATUS")) & 1, "the queue was not enabled"

    def _compare(
        self,
        steps: list[Step],
        descriptors: list[Descriptor],
        completions: list[Completion],
        memory: SparseMemory,
    ) -> None:
        core = FunctionalCore(self.config, memory)
        chained = failed = False
        for index, (step, d, completion) in enumerate(zip(steps, descriptors, completions, strict=True)):
            where = f"descriptor {index} {step.name}: {d.describe()}"
            slot, result = (base + index * self.slot_bytes for base in (self._submission, self._results))
            failed &= chained
            if failed:
                wanted = Outcome(Status.CHAIN_ABORTED)
            else:
                wanted = core.execute(
                    d,
                    self.window,
                    slot,
                    result,
                    first=not chained,
                    softmax_scale=step.scale,
                    exponents=step.exponents,
                )
            assert completion.valid == valid_word(PASS), f"{where}: never completed"
            assert completion.descriptor == d, f"{where}: another descriptor was completed"
            assert completion.status == wanted.status, (
                f"{where}: {Status(completion.status).name}, not {wanted.status.name}"
            )
            assert completion.numeric == wanted.numeric, f"{where}: numeric {completion.numeric}"
            assert completion.result_bytes == wanted.result_bytes, f"{where}: {completion.result_bytes} result bytes"
            start = result + RESULT_OFFSET
            size = self.slot_bytes - RESULT_OFFSET
            is_values: Any = np.frombuffer(self.device.peek(start, size), np.uint16)
            wanted_values: Any = np.frombuffer(_read_past_errors(memory, start, size), np.uint16)
            different = np.flatnonzero(is_values != wanted_values)
            if len(different):
                at = int(different[0])
                raise AssertionError(
                    f"{where}: {len(different)} values differ; first is value {at % 32} of line {at // 32}:"
                    f" {is_values[at]:#06x} instead of {wanted_values[at]:#06x}"
                )
            failed = bool(d.chain) and wanted.status is not Status.OK
            chained = bool(d.chain)


def _read_past_errors(memory: SparseMemory, address: int, size: int) -> bytes:
    bad, memory._bad = memory._bad, []
    try:
        return memory.read(address, size)
    finally:
        memory._bad = bad


def random_steps(config: NdpConfig, rng: random.Random, count: int, *, mutations: float = 0.0) -> list[Step]:
    """Chains and single descriptors of random shapes, nearly all legal; some with one field changed.

    The last ends its chain, so that the device does not wait for more.
    """
    numbers = np.random.default_rng(rng.getrandbits(32))
    window = QueueWindow(0, 1 << config.dpa_bits, 1 << SLOT_LOG2, 1 << SLOT_LOG2)
    steps: list[Step] = []
    state = ChainState()
    while len(steps) < count:
        chain = int(len(steps) + 1 < count and rng.random() < 0.6)
        for _ in range(30):
            d, scale = legal_descriptor(rng, config, state, chain=chain), softmax_scale(rng.uniform(0.05, 2))
            verdict = check(d, config, window, state, scale)
            if d.device_bytes <= 1 << 16 and verdict.status is Status.OK:
                break
        else:
            d = describe(config, rng.randint(1, 9), rng.randint(1, 99), 1, chain=chain)
            verdict = check(d, config, window, state)
        kind = rng.choice(["normal", "normal", "integers", "bits"])
        x = random_values(numbers, d.gpu_rows, d.gpu_columns, kind) if d.source == Source.SLOT else None
        shape = (d.device_columns, d.device_rows) if d.transpose else (d.device_rows, d.device_columns)
        if expansion_log2(d.dtype):
            x = None if x is None else np.where(np.isfinite(x), x, np.float16(-2))
            steps.append(Step(d, x=x, w=random_integers(numbers, *shape, d.dtype, kind), scale=scale))
            state = verdict.chain if d.chain else ChainState()
            continue
        w = random_values(numbers, *shape, kind)
        if rng.random() < 0.4:
            exponents = random_exponents(rng)
            if kind != "bits":
                x, w = None if x is None else as_bf16(x), as_bf16(w)
            steps.append(Step(replace(d, dtype=DType.BF16), x=x, w=w, scale=scale, exponents=exponents))
            state = verdict.chain if d.chain else ChainState()
            continue
        if kind == "bits" and rng.random() < 0.8:  # mostly finite, or every result is NaN
            w = np.where(np.isfinite(w), w, np.float16(1.5))
            x = None if x is None else np.where(np.isfinite(x), x, np.float16(-2))
        if rng.random() < mutations:
            d, x, w = mutate(rng, d), None, None
            if not chain:
                d = replace(d, chain=0)
        steps.append(Step(d, x=x, w=w, scale=scale))
        state = verdict.chain if d.chain else ChainState()
    return steps
