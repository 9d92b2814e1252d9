"""The decoder against `plora.hw.defs.legality.check`, descriptor by descriptor, chain state included."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from plora.hw.defs.config import DOT_LANES, PRESETS, NdpConfig
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source
from plora.hw.defs.legality import ChainState, QueueWindow, check
from plora.hw.defs.packing import (
    ceil_div,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.hw.defs.queue import Exponents, softmax_scale
from plora.hw.defs.status import CHECK_ORDER, Status
from plora.hw.rtl.core.decoder import Decoder
from plora.hw.rtl.core.job import Destination, work_layout
from plora.hw.rtl.interfaces import fetched_layout
from tests.hw.rtl.core.bench import (
    Case,
    describe,
    fetched_payload,
    fields,
    legal_descriptor,
    mutate,
    operand_stripes,
    random_dtype,
    random_exponents,
    random_scale,
    random_window,
    simulate,
)


class Specification:
    """What the decoder must say: `check`, and the fate of a chain with a refused member."""

    def __init__(self, config: NdpConfig) -> None:
        self.config = config
        self.state = ChainState()
        self.aborted = False
        self.newest = 0
        """Bank of the newest softmax terms of any chain."""

    def judge(self, case: Case) -> Status:
        """Return the status of the next descriptor, and remember what it leaves."""
        if case.first:
            self.state, self.aborted = ChainState(), False
        self.before = self.state
        verdict = check(case.descriptor, self.config, case.window, self.state, case.scale, case.exponents)
        status = Status.CHAIN_ABORTED if self.aborted else verdict.status
        if case.verdict:
            status = Status(case.verdict)
        self.aborted = bool(case.descriptor.chain) and status is not Status.OK
        self.state = verdict.chain if status is Status.OK else ChainState()
        if status is Status.OK and case.descriptor.op == Op.SOFTMAX and case.descriptor.keep == Keep.NEW:
            self.newest = 1 - self.newest
        return status

    def work(self, case: Case) -> dict[str, Any]:
        """Return the work of a descriptor that was just found legal."""
        config, d = self.config, case.descriptor
        destination = (
            Destination.ACCUMULATORS if d.acc_out else Destination.KEPT if d.keep != Keep.NONE else Destination.MEMORY
        )
        expected: dict[str, Any] = {
            "load": int(d.source == Source.SLOT),
            "from_kept": int(d.source in (Source.KEPT, Source.PREVIOUS)),
            "pairs": ceil_div(d.gpu_rows, 2),
            "single": d.gpu_rows % 2,
            "weights_address": d.device_address // config.stripe_bytes,
            "continues": d.acc_in,
            "destination": destination,
            "token_wise": d.transpose,
            "softmax": int(d.op == Op.SOFTMAX),
            "bf16": int(d.dtype == DType.BF16),
            "exponents": case.exponents._asdict(),
            **(self.transposed(d) if d.transpose else self.packed(d)),
        }
        terms = d.op == Op.SOFTMAX or bool(d.transpose)
        bank = self.newest ^ (d.source == Source.PREVIOUS) if terms else 0
        if d.keep == Keep.APPEND or d.transpose:
            expected["kept_word"] = (self.before.acc_terms if d.transpose else self.before.kept_columns) // 32
        if d.keep == Keep.NEW:
            expected["kept_word"] = 0
        if "kept_word" in expected:
            expected |= {"bank": bank, "kept_word": expected["kept_word"] + bank * config.bank_words}
        if expected["from_kept"] or d.keep != Keep.NONE:
            expected["kept_stride"] = config.kept_stride(expected["pairs"], softmax=terms)
        if d.op == Op.SOFTMAX:
            expected |= {"begins": int(d.keep == Keep.NEW), "scale": case.scale >> 7}
        if d.source == Source.SLOT:
            expected["operand_stripes"] = operand_stripes(config, d)
        if not expected["from_kept"]:
            expected["row_stripes"] = operand_row_stripes(config, d.device_columns)
        if destination is Destination.MEMORY:
            expected["row_words"] = result_row_words(d.device_rows, transpose=d.transpose)
        return expected

    def packed(self, d: Descriptor) -> dict[str, int]:
        """Return what the work says of an ordinary device operand."""
        g = pack_geometry(self.config, d.device_rows, d.device_columns, d.dtype)
        return {
            "stripes": g.stripes,
            "groups": g.groups,
            "beats": g.beats,
            "expansion": g.expansion_log2,
            "group_stripes": 0 if g.expansion_log2 else g.beats,
            "skip": 0,
            "tap": {32: 0, 16: 1, 8: 2}[g.tap_lanes],
            "split_log2": g.split.bit_length() - 1,
            "tail": d.device_columns - (g.beats - 1) * g.tap_lanes * g.split,
            "group_rows": g.group_rows,
            "last_rows": d.device_rows - (g.groups - 1) * g.group_rows,
        }

    def transposed(self, d: Descriptor) -> dict[str, int]:
        """Return what the work says of a transposed one."""
        g = pack_geometry_transposed(self.config, d.device_rows, d.device_columns, d.dtype)
        return {
            "stripes": g.stripes,
            "groups": g.groups,
            "beats": g.beats,
            "expansion": g.expansion_log2,
            "group_stripes": g.group_stripes,
            "skip": (g.stride(d.device_bytes) or 0) - g.group_stripes,
            "tap": 0,
            "split_log2": 0,
            "tail": d.device_columns - (g.beats - 1) * DOT_LANES,
            "group_rows": g.group_rows,
            "last_rows": d.device_rows - (g.groups - 1) * g.group_rows,
        }


def random_cases(config: NdpConfig, count: int, seed: int) -> list[Case]:
    """Chains of near-legal descriptors. Whether each is legal is found out by the specification."""
    rng = random.Random(seed)
    specification = Specification(config)
    cases: list[Case] = []
    chained = False
    while len(cases) < count:
        first = not chained
        if first:
            specification.state, specification.aborted = ChainState(), False
        chain = int(rng.random() < 0.75)
        wants_legal = rng.random() < 0.6
        for _ in range(20):
            d = legal_descriptor(rng, config, specification.state, chain=chain)
            window, d = random_window(rng, config, d)
            d = d if d.dtype else replace(d, dtype=random_dtype(rng))
            scale, exponents = random_scale(rng), random_exponents(rng)
            if rng.random() < 0.1:
                exponents = Exponents(*(rng.choice([39, 40, 127, -128]) for _ in range(3)))
            verdict = check(d, config, window, specification.state, scale, exponents)
            if not wants_legal or verdict.status is Status.OK:
                break
        if not wants_legal and rng.random() < 0.5:
            d = mutate(rng, d)
        refused = rng.choice([Status.CHAIN_BROKEN, Status.MEMORY_ERROR]) if rng.random() < 0.02 else Status.OK
        case = Case(d, first, window, refused, scale, exponents)
        status = specification.judge(case)
        chained = bool(d.chain) and rng.random() < (0.95 if status is Status.OK else 0.3)
        cases.append(case)
    return cases


def channels(count: int) -> NdpConfig:
    return replace(PRESETS["tiny"], name=f"tiny-{count}", channels=count)


def judged(config: NdpConfig, cases: list[Case]) -> tuple[Counter[tuple[Status, Source]], int]:
    """Let the decoder judge ``cases`` as the specification does. Returns what came of how many, by source, and legal
    members of attention chains."""
    dut = Decoder(config)
    specification = Specification(config)
    seen: Counter[tuple[Status, Source]] = Counter()
    attention = 0

    async def bench(ctx: Any) -> None:
        nonlocal attention
        ctx.set(dut.output.ready, 1)
        ctx.set(dut.input.valid, 1)
        for number, case in enumerate(cases):
            operand, result = random.Random(number).choices(range(1 << config.dpa_bits - 6), k=2)
            ctx.set(
                dut.input.payload,
                fetched_layout(config).const(
                    fetched_payload(case, queue=number % 64, operand_address=operand, result_address=result)
                ),
            )
            status = specification.judge(case)
            seen[status, Source(case.descriptor.source)] += 1
            taken, valid = 0, 0
            while not valid:
                _, _, valid, ready, payload = await ctx.tick().sample(
                    dut.output.valid, dut.input.ready, dut.output.payload
                )
                taken += 1
                assert valid == ready
            assert taken == (dut.transposed_cycles if case.descriptor.transpose else dut.cycles)
            where = f"case {number} of {config.name}: {case.descriptor.describe()}"
            record = payload.record
            assert record.status == status, f"{where}: {Status(record.status).name} instead of {status.name}"
            assert (record.queue, record.first, record.verdict) == (number % 64, case.first, bool(case.verdict))
            assert record.result_address == result
            if status is Status.OK:
                attention += case.descriptor.op == Op.SOFTMAX or case.descriptor.transpose
                work = fields(payload.work, work_layout(config))
                expected = specification.work(case) | {"operand_address": operand // config.channels}
                different = {name: (work[name], value) for name, value in expected.items() if work[name] != value}
                assert not different, f"{where}: work (is, should be) {different}"

    simulate(dut, bench, deadline_cycles=20 * len(cases) * dut.cycles)
    return seen, attention


@pytest.mark.parametrize(
    ("config", "count"),
    [(PRESETS["tiny"], 900), (channels(1), 200), (PRESETS["small"], 200), (PRESETS["full"], 400)],
    ids=lambda value: getattr(value, "name", None),
)
def test_status_and_work_equal_the_specification(config: NdpConfig, count: int) -> None:
    by_source, attention = judged(config, random_cases(config, count, seed=config.channels))
    seen: Counter[Status] = Counter()
    for (status, _), number in by_source.items():
        seen[status] += number
    assert seen[Status.OK] > count // 4, f"too few legal descriptors: {seen}"
    assert attention > count // 20, f"too few legal members of attention chains: {attention}"
    if count >= 700:
        missing = {*CHECK_ORDER, Status.CHAIN_ABORTED} - set(seen)
        assert not missing, f"never produced {missing}"


def heads_in_turns(config: NdpConfig, chains: int, seed: int) -> list[Case]:
    """Chains of attention in which scores, values of either bank and plain intermediates come in any order."""
    rng = random.Random(seed)
    window = QueueWindow(0, 1 << config.dpa_bits, 1 << 14, 1 << 14)
    cases = []
    for _ in range(chains):
        state, seen = ChainState(), [(1, 1)]
        length = rng.randint(2, 9)
        for index in range(length):
            kind = rng.choice(["new", "new", "append", "kept", "previous", "previous", "plain"])
            rows, tokens = rng.choice([1, 2]), rng.choice([32, 64, rng.randint(1, 100)])
            if kind == "new" or index == 0:
                d = describe(config, tokens, 16, rows, op=Op.SOFTMAX, keep=Keep.NEW)
            elif kind == "append":
                shape = tokens, state.operand_columns or 1, state.kept_rows or 1
                d = describe(config, *shape, op=Op.SOFTMAX, keep=Keep.APPEND, source=Source.CHAIN)
            elif kind == "plain":
                d = describe(config, 32, 16, rows, keep=Keep.NEW)
            else:
                previous = kind == "previous"
                kept, before = (state.kept_rows, state.kept_columns), (state.previous_rows, state.previous_columns)
                # Where there are none, some of old.
                rows, there = (before if before[0] else rng.choice(seen)) if previous else kept
                left = max(1, there - state.acc_terms - (rng.random() < 0.1))
                acc_out = int(left > 32 and rng.random() < 0.4)
                k = 32 if acc_out else left
                size = pack_geometry_transposed(config, 2, k).packed_bytes()
                d = describe(
                    config, 2, k, rows, transpose=1, device_bytes=size, acc_out=acc_out,
                    source=Source.PREVIOUS if previous else Source.KEPT, acc_in=int(state.acc_rows > 0),
                )  # fmt: skip
            d = replace(d, chain=int(index < length - 1 or d.keep != Keep.NONE or d.acc_out))
            cases.append(Case(d, index == 0, window, scale=softmax_scale(1.0)))
            verdict = check(d, config, window, state, cases[-1].scale)
            if verdict.status is not Status.OK:
                break
            state = verdict.chain
            seen.append((state.kept_rows, state.kept_columns))
    return cases


@pytest.mark.parametrize("config", [PRESETS["tiny"], PRESETS["full"]], ids=["tiny", "full"])
def test_banks_of_softmax_terms_take_turns(config: NdpConfig) -> None:
    cases = heads_in_turns(config, 120, seed=config.channels)
    seen, _ = judged(config, cases)
    assert min(seen[Status.OK, source] for source in (Source.KEPT, Source.PREVIOUS)) > 10, seen
    assert seen[Status.CHAIN_BROKEN, Source.PREVIOUS] > 10, seen
