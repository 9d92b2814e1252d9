"""Helpers of the core's tests: simulation, random descriptors, memories with moods."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from amaranth._unused import MustUse
from amaranth.sim import Simulator

from plora.hw.defs.config import KEPT_MAX_VALUES, WORD_VALUES, NdpConfig, preset
from plora.hw.defs.descriptor import FIELDS, Descriptor, DType, Keep, Op, Source
from plora.hw.defs.legality import ChainState, QueueWindow
from plora.hw.defs.packing import operand_row_stripes, pack_geometry, pack_geometry_transposed
from plora.hw.defs.queue import (
    MAX_OPERAND_EXPONENT,
    MIN_OPERAND_EXPONENT,
    NO_EXPONENTS,
    Exponents,
    softmax_scale,
)

CLOCK_PERIOD_S = 1e-9
TINY = preset("tiny")


def simulate(
    dut: Any,
    *benches: Callable[[Any], Awaitable[None]],
    background: Iterable[Callable[[Any], Awaitable[None]]] = (),
    deadline_cycles: int = 100_000,
    vcd: str | None = None,
) -> None:
    """Run ``benches`` on ``dut`` until the last of them returns; fail after ``deadline_cycles``."""
    simulator = Simulator(dut)
    simulator.add_clock(CLOCK_PERIOD_S)
    for bench in benches:
        simulator.add_testbench(bench)
    for bench in background:
        simulator.add_testbench(bench, background=True)

    def run() -> None:
        # A clock period is two steps of the simulator.
        for _ in range(2 * deadline_cycles):
            if not simulator.advance():
                return
        raise AssertionError(f"not finished after {deadline_cycles} cycles")

    if vcd is None:
        run()
    else:
        with simulator.write_vcd(vcd):
            run()


def refused(message: str, make: Callable[[], Any]) -> None:
    """Check that ``make`` raises ValueError with ``message``, and keep Amaranth from missing what was not made."""
    MustUse._MustUse__silence = True
    try:
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
        gc.collect()
    finally:
        MustUse._MustUse__silence = False


async def feed(ctx: Any, stream: Any, payloads: Iterable[Any], rng: random.Random, stall: float = 0.0) -> None:
    """Offer ``payloads`` one after the other, each after a pause of random length."""
    for payload in payloads:
        while rng.random() < stall:
            await ctx.tick()
        ctx.set(stream.payload, payload)
        ctx.set(stream.valid, 1)
        await ctx.tick().until(stream.ready)
        ctx.set(stream.valid, 0)


async def drain(ctx: Any, stream: Any, into: list[Any], count: int, rng: random.Random, stall: float = 0.0) -> None:
    """Append ``count`` payloads of ``stream`` to ``into``, not ready in a random part of all cycles.

    While an offer waits it must stand as it is.
    """
    waiting = None
    while count:
        ready = rng.random() >= stall
        ctx.set(stream.ready, ready)
        *_, valid, payload = await ctx.tick().sample(stream.valid, stream.payload)
        assert waiting is None or (valid and payload == waiting), "an offer was withdrawn or changed"
        waiting = payload if valid and not ready else None
        if valid and ready:
            into.append(payload)
            count -= 1
    ctx.set(stream.ready, 0)


def fields(view: Any, layout: Any) -> dict[str, Any]:
    """Return a structure's members as plain integers and nested dictionaries."""
    out: dict[str, Any] = {}
    for name, member in layout:
        value = view[name]
        out[name] = fields(value, member.shape) if hasattr(member.shape, "members") else int(_plain(value))
    return out


def _plain(value: Any) -> int:
    return int(getattr(value, "value", value))


@dataclass(frozen=True)
class Case:
    """One descriptor with everything that comes with it."""

    descriptor: Descriptor
    first: bool
    window: QueueWindow
    verdict: int = 0
    scale: int = 0
    """Softmax scale, FP32 bits."""
    exponents: Exponents = NO_EXPONENTS


def legal_descriptor(rng: random.Random, config: NdpConfig, state: ChainState, *, chain: int) -> Descriptor:
    """A descriptor that is probably legal after ``state``, of dimensions that reach every limit now and then."""

    def dimension(limit: int) -> int:
        edge = rng.choice([1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, limit, limit + 1])
        return max(1, rng.choice([edge, rng.randint(1, 12), rng.randint(1, limit), min(edge, limit)]))

    if rng.random() < (0.7 if state.kept_softmax else 0.2):
        return attention_descriptor(rng, config, state, chain=chain)
    source, keep, acc_out = Source.SLOT, Keep.NONE, 0
    n, k, b = dimension(300), dimension(1500), rng.choice([1, 1, 2, 3, dimension(40)])
    if rng.random() < 0.05:
        k = rng.choice([65535, 65536, 65537, 40000])
        n, b = rng.randint(1, 3), 1
    if rng.random() < 0.05:  # about as much as the DRAM buffer holds
        n, b = rng.randint(config.channels, config.channels + 1), 3
        k = WORD_VALUES * config.dram_buffer_stripes + rng.randint(-40, 40)
        return describe(config, n, k, b, source=Source.CHAIN, chain=chain)
    if chain:
        keep = rng.choice([Keep.NONE, Keep.NEW, Keep.APPEND])
        acc_out = int(keep == Keep.NONE and rng.random() < 0.5)
    if state.kept_columns and rng.random() < 0.6:
        source, b, k = Source.KEPT, state.kept_rows, state.kept_columns
        if keep == Keep.NEW and rng.random() < 0.9:
            keep = Keep.APPEND
    elif state.operand_columns and rng.random() < 0.6:
        source, b, k = Source.CHAIN, state.operand_rows, state.operand_columns
    if keep == Keep.APPEND and rng.random() < 0.8:
        b = state.kept_rows or b
        n = rng.randint(1, max(1, KEPT_MAX_VALUES - state.kept_columns + 1))
    elif keep == Keep.NEW and rng.random() < 0.8:
        n = rng.choice([WORD_VALUES * rng.randint(1, 8), n])
    if acc_out or state.acc_rows:
        n, b = state.acc_rows or rng.randint(1, config.channels), state.acc_batch or rng.randint(1, 2)
    if rng.random() < 0.1:
        source = rng.choice(list(Source))
    return describe(
        config, n, k, b, source=source, keep=keep, chain=chain, acc_out=acc_out, acc_in=int(state.acc_rows > 0)
    )


def attention_descriptor(rng: random.Random, config: NdpConfig, state: ChainState, *, chain: int) -> Descriptor:
    """A descriptor of an attention chain that is probably legal after ``state``: scores, or values weighed by them."""
    # Mostly types by turns, and now and then one that does not fit the sizes.
    dtype = rng.choice([DType.FP16] * 3 + [DType.INT8, DType.INT4])
    stated = {"dtype": rng.choice([dtype] * 12 + [DType.INT8])}
    tokens, b = rng.choice([1, 16, 31, 32, 33, 64, 96, 160, rng.randint(1, 300)]), rng.choice([1, 2, 3, 8, 31, 32, 33])
    if not state.kept_softmax or (chain and rng.random() < 0.4):
        k, source, keep = rng.choice([1, 8, 64, 80, 128, 256, 257]), Source.SLOT, Keep.NEW
        if state.kept_softmax and rng.random() < 0.5:
            b, k, source, keep = state.kept_rows, state.operand_columns or k, Source.CHAIN, Keep.APPEND
        limit = 32 * config.kept_stride(-(-b // 2), softmax=True)
        n = rng.choice([32 * rng.randint(1, 9), tokens, max(1, limit - state.kept_columns + rng.randint(-1, 1))])
        keep = rng.choice([keep] * 12 + list(Keep))
        size = pack_geometry(config, n, k, dtype).packed_bytes
        return describe(
            config, n, k, b, op=Op.SOFTMAX, source=source, keep=keep, chain=int(chain or rng.random() < 0.9),
            device_bytes=size, **stated,
        )  # fmt: skip
    dims = rng.choice([1, 16, 64, 80, 96, 128, 255, 256, 257])
    acc_out = int(chain and rng.random() < 0.5)
    source, b, kept = Source.KEPT, state.kept_rows, state.kept_columns
    if state.acc_previous or (state.previous_columns and rng.random() < 0.6) or rng.random() < 0.03:
        source, b, kept = Source.PREVIOUS, state.previous_rows or b, state.previous_columns
    left = max(1, kept - state.acc_terms)
    tokens = left if not acc_out else rng.choice([32 * rng.randint(1, 4), left, left + 1, tokens])
    if acc_out or state.acc_rows:
        dims = state.acc_rows or rng.choice([*range(1, 2 * config.channels + 1), 2 * config.channels + 1])
    g = pack_geometry_transposed(config, dims, tokens, dtype)
    stride = rng.choice([g.group_stripes, g.group_stripes + rng.randint(0, 9), g.group_stripes - 1])
    size = g.packed_bytes(stride) + rng.choice([0] * 12 + [config.stripe_bytes, 2])
    return describe(
        config, dims, tokens, b, source=source, transpose=1, device_bytes=size,
        keep=rng.choice([Keep.NONE] * 12 + list(Keep)), chain=chain, acc_out=acc_out, acc_in=int(state.acc_rows > 0),
        **stated,
    )  # fmt: skip


def random_dtype(rng: random.Random) -> DType:
    """A type, mostly a legal one."""
    return rng.choice([DType.FP16] * 20 + [DType.BF16] * 12 + [DType.INT8, DType.INT4])


def random_exponents(rng: random.Random, reach: int = 6) -> Exponents:
    """Legal exponents, some of them far away."""
    far = rng.random() < 0.1
    low, high = (MIN_OPERAND_EXPONENT, MAX_OPERAND_EXPONENT) if far else (-reach, reach)
    return Exponents(*(rng.randint(low, high) for _ in range(3)))


def random_scale(rng: random.Random) -> int:
    """Bits of a softmax scale, mostly legal."""
    return rng.choice([softmax_scale(rng.choice([0.18, 2.0**-24, 255.9, rng.uniform(0.01, 200)]))] * 8 + [
        0, 0x437FFFFF, 0x43800000, 0x337FFFFF, 0x33800000, 0x80000000 | softmax_scale(1.0), 0x7FC00000,
        rng.getrandbits(32),
    ])  # fmt: skip


def describe(config: NdpConfig, n: int, k: int, b: int, *, address: int = 0, **flags: int) -> Descriptor:
    """The descriptor of y (b x n) = x (b x k) W^T with consistent sizes, cut to the width of their fields."""
    limits = {f.name: (1 << f.width) - 1 for f in FIELDS}
    values = {
        "op": Op.GEMV if b == 1 else Op.GEMM,
        "device_address": address,
        "device_bytes": pack_geometry(config, n, k, flags.get("dtype", DType.FP16)).packed_bytes,
        "device_rows": n,
        "device_columns": k,
        "gpu_bytes": 2 * b * k,
        "gpu_rows": b,
        "gpu_columns": k,
        **flags,
    }
    return Descriptor(**{name: int(value) & limits[name] for name, value in values.items()})


def mutate(rng: random.Random, descriptor: Descriptor) -> Descriptor:
    """Change one field a little or altogether."""
    name, _, width, _ = rng.choice(FIELDS)
    value = int(getattr(descriptor, name))
    changed = rng.choice(
        [value + 1, value - 1, value ^ 1 << rng.randrange(width), rng.randrange(1 << width), 0, (1 << width) - 1]
    )
    return replace(descriptor, **{name: changed & (1 << width) - 1})


def random_window(rng: random.Random, config: NdpConfig, descriptor: Descriptor) -> tuple[QueueWindow, Descriptor]:
    """A window and an address for the descriptor: mostly inside, often touching an edge."""
    memory = 1 << config.dpa_bits
    stripe = config.stripe_bytes
    base = rng.randrange(0, memory // 2, stripe)
    limit = rng.choice([memory, rng.randrange(base, memory + 1), base + descriptor.device_bytes + stripe])
    last = max(base, limit - descriptor.device_bytes) // stripe * stripe
    address = rng.choice([base, last, rng.randrange(base, last + 1, stripe) if last > base else base])
    mood = rng.random()
    if mood < 0.04:
        address = rng.choice([last + stripe, max(0, base - stripe), memory, (1 << 64) - stripe, limit & -stripe])
    elif mood < 0.06:
        limit = rng.choice([memory + 1, (1 << 64) - 1, base, 0, address + descriptor.device_bytes - 1])
    elif mood < 0.08:
        base = rng.choice([address + 1, (1 << 64) - 1])
    slots = [1 << rng.choice([11, 11, 12, 14, 18, 20, 24]) for _ in range(2)]
    return QueueWindow(base, limit, *slots), replace(descriptor, device_address=address & (1 << 64) - 1)


def fetched_payload(case: Case, *, queue: int = 0, operand_address: int = 0, result_address: int = 0) -> dict[str, Any]:
    """``case`` as `plora.hw.rtl.interfaces.fetched_layout` wants it; addresses in words."""
    return {
        "descriptor": {f.name: int(getattr(case.descriptor, f.name)) for f in FIELDS},
        "scale": case.scale,
        "exponents": case.exponents._asdict(),
        "queue": queue,
        "first": int(case.first),
        "verdict": case.verdict,
        "operand_address": operand_address,
        "result_address": result_address,
        "base": case.window.base,
        "limit": case.window.limit,
        "submission_slot_log2": case.window.submission_slot_bytes.bit_length() - 1,
        "result_slot_log2": case.window.result_slot_bytes.bit_length() - 1,
    }


def operand_stripes(config: NdpConfig, descriptor: Descriptor) -> int:
    """Stripes of the GPU operand in its slot."""
    return descriptor.gpu_rows * operand_row_stripes(config, descriptor.gpu_columns)


__all__ = [name for name in globals() if not name.startswith("_") and name != "annotations"]
