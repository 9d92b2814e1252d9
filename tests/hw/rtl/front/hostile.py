"""Hostile input by the million: random descriptors, queue set-ups and register writes, and what must come of them."""

from __future__ import annotations

import math
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from plora.hw.cosim.device import AllowedWindow, RtlDevice
from plora.hw.cosim.rings import PACKED_BYTES, RingLoad, disable, drive_rings, enable
from plora.hw.defs.config import VALUE_BYTES, NdpConfig
from plora.hw.defs.descriptor import FIELDS, Descriptor, DType, Keep, Op, Source
from plora.hw.defs.legality import ChainState, RingSetup, check, ring_setup_allowed
from plora.hw.defs.packing import pack_geometry, pack_geometry_transposed
from plora.hw.defs.queue import EXPONENTS_OFFSET, SOFTMAX_SCALE_OFFSET, VALID_OFFSET, Exponents
from plora.hw.defs.registers import (
    GLOBAL,
    MMIO_BITS,
    PENDING_BASE,
    QUEUE,
    RESET_CHAIN_LIMIT,
    RESET_CHAIN_TIMEOUT,
    RESET_WATCHDOG,
    VECTOR,
    Access,
    global_offset,
    queue_offset,
    vector_offset,
)
from plora.hw.defs.status import Status
from plora.hw.rtl.front.links import CORE, QUEUES

Columns = dict[str, npt.NDArray[np.uint64]]
Scale = tuple[int, Exponents]
"""What a slot's line 0 states beside the descriptor."""
SLOT_LOG2 = 11
HOSTILE, VICTIM = 0, 1
SLOWEST_ANSWER = 4096
"""Cycles within which the memories of these runs answer something."""
RESET = {"CHAIN_LIMIT": RESET_CHAIN_LIMIT, "CHAIN_TIMEOUT": RESET_CHAIN_TIMEOUT, "WATCHDOG": RESET_WATCHDOG}


def product(config: NdpConfig, rows: int, columns: int, batch: int, address: int) -> Descriptor:
    """A descriptor whose sizes follow from its shape."""
    return Descriptor(
        op=Op.GEMM,
        device_address=address,
        device_bytes=pack_geometry(config, rows, columns).packed_bytes,
        device_rows=rows,
        device_columns=columns,
        gpu_bytes=batch * columns * VALUE_BYTES,
        gpu_rows=batch,
        gpu_columns=columns,
    )


def plausible_descriptors(config: NdpConfig, setup: RingSetup, count: int, rng: random.Random) -> list[Descriptor]:
    """Legal descriptors and chains of two, small ones, and some that are too large, or ask for what is not theirs."""
    found: list[Descriptor] = []
    while len(found) < count:
        rows, columns = rng.choice([1, 2, 7, 8, 33]), rng.choice([1, 8, 9, 17, 64, 100])
        batch = rng.choice([1, 1, 2, 3])
        kind = rng.random()
        if kind < 0.2:
            rows, columns = rng.choice([8, 300, 4000]), rng.choice([8, 64, 2200, 40_000])
            batch = rng.choice([1, 3, 20, 60, 700])
        d = product(config, rows, columns, batch, setup.base)
        if d.device_bytes >= 1 << 20 or d.gpu_bytes >= 1 << 20:
            continue
        room = max(0, setup.limit - setup.base - d.device_bytes) // config.stripe_bytes
        address = setup.base + rng.choice([0, room, rng.randrange(room + 1)]) * config.stripe_bytes
        if 0.2 < kind < 0.3:
            beyond = [setup.limit - d.device_bytes + config.stripe_bytes, setup.limit, setup.base - config.stripe_bytes]
            beyond += [0, 1 << config.dpa_bits, (1 << 64) - config.stripe_bytes]
            address = rng.choice(beyond) // config.stripe_bytes * config.stripe_bytes % (1 << 64)
        d = replace(d, device_address=address, op=Op.GEMV if batch == 1 and rng.random() < 0.5 else Op.GEMM)
        if kind > 0.9 and d.device_rows < 100:
            found += attention_chain(config, setup, rng)
            continue
        if kind > 0.8:
            keep = rng.choice([Keep.NONE, Keep.NEW])
            found.append(replace(d, chain=1, keep=keep))
            source = Source.KEPT if keep else Source.CHAIN
            d = replace(product(config, 8, rows if keep else columns, batch, setup.base), source=source)
        found.append(d)
    return found


def attention_chain(config: NdpConfig, setup: RingSetup, rng: random.Random) -> list[Descriptor]:
    """Scores of some tokens through the softmax unit, and their values weighed, or by scores that are not there."""
    tokens, dims, batch = rng.choice([1, 16, 40]), rng.choice([8, 33, 64]), rng.choice([1, 2, 3])
    of_keys, of_values = (rng.choice([DType.FP16, DType.FP16, DType.INT8, DType.INT4]) for _ in range(2))
    scores = replace(
        product(config, tokens, dims, batch, setup.base), op=Op.SOFTMAX, chain=1, keep=Keep.NEW, dtype=of_keys,
        device_bytes=pack_geometry(config, tokens, dims, of_keys).packed_bytes,
    )  # fmt: skip
    values = product(config, dims, tokens, batch, setup.base)
    packed_bytes = pack_geometry_transposed(config, dims, tokens, of_values).packed_bytes()
    source = rng.choice([Source.KEPT, Source.KEPT, Source.PREVIOUS])
    return [scores, replace(values, source=source, transpose=1, device_bytes=packed_bytes, dtype=of_values)]


def columns_of(descriptors: list[Descriptor]) -> Columns:
    return {f.name: np.array([getattr(d, f.name) for d in descriptors], np.uint64) for f in FIELDS}


def hostile_columns(plausible: Columns, count: int, setup: RingSetup, rng: np.random.Generator) -> Columns:
    """``count`` descriptors: plausible ones, most of them with one to three fields changed, some random throughout."""
    start = rng.integers(0, len(plausible["op"]) - 1, (count + 1) // 2)
    picked = np.stack([start, start + 1], axis=1).reshape(-1)[:count]
    columns = {name: values[picked] for name, values in plausible.items()}
    changes = rng.choice([0, 1, 1, 1, 2, 3], count)
    for _ in range(3):
        chosen = rng.integers(0, len(FIELDS), count)
        for number, f in enumerate(FIELDS):
            rows = np.flatnonzero((chosen == number) & (changes > 0))
            columns[f.name][rows] = _values(f.name, f.width, columns[f.name][rows], setup, rng)
        changes -= 1
    wild = np.flatnonzero(rng.random(count) < 0.03)
    for f in FIELDS:
        columns[f.name][wild] = rng.integers(0, (1 << f.width) - 1, len(wild), np.uint64, endpoint=True)
    # A chain that nothing follows would wait for its successor.
    columns["chain"][-1] = 0
    return columns


def _values(
    name: str, width: int, old: npt.NDArray[np.uint64], setup: RingSetup, rng: np.random.Generator
) -> npt.NDArray[np.uint64]:
    """Other values for a field: its ends, neighbours of the old ones, powers of two, anything."""
    top = (1 << width) - 1
    edges = [0, 1, top, top - 1, top >> 1]
    if name == "device_address":
        places = (setup.base, setup.limit, setup.submission_base, setup.result_base, 1 << 24, 1 << 40)
        edges += [(place + step) & top for place in places for step in (-128, -64, -1, 0, 1, 64, 128)]
    fixed = np.array(edges, np.uint64)
    n = len(old)
    candidates = np.stack(
        [
            fixed[rng.integers(0, len(fixed), n)],
            old + rng.integers(0, 3, n).astype(np.uint64) - np.uint64(1),
            np.uint64(1) << rng.integers(0, width, n).astype(np.uint64),
            rng.integers(0, top, n, np.uint64, endpoint=True),
            rng.integers(0, 130, n).astype(np.uint64),
        ]
    )
    return candidates[rng.integers(0, len(candidates), n), np.arange(n)] & np.uint64(top)


def packed(columns: Columns) -> npt.NDArray[np.uint8]:
    """The descriptors in memory's form, one a row of `PACKED_BYTES`."""
    words = np.zeros((len(columns["op"]), PACKED_BYTES // 8), np.uint64)
    for f in FIELDS:
        word, shift = divmod(f.offset, 64)
        words[:, word] |= columns[f.name] << np.uint64(shift)
        if shift + f.width > 64:
            words[:, word + 1] |= columns[f.name] >> np.uint64(64 - shift)
    return words.view(np.uint8)


def expected_statuses(
    config: NdpConfig,
    setup: RingSetup,
    columns: Columns,
    scales: Sequence[Scale],
    observed: Sequence[int] | None = None,
) -> Iterator[int]:
    """What the specification says of each descriptor of one queue, in order; ``scales``: of each slot.

    With ``observed`` statuses a chain may be closed at any of its members but the first, as CHAIN_LIMIT and
    CHAIN_TIMEOUT have it: that member gets CHAIN_BROKEN and the rest CHAIN_ABORTED, whatever they are.
    """
    window = setup.window
    chain, failed, inside, closed = ChainState(), False, False, False
    for number, values in enumerate(zip(*(columns[f.name].tolist() for f in FIELDS), strict=True)):
        d = Descriptor(*values)
        if closed or (inside and failed):
            status = Status.CHAIN_ABORTED
        else:
            verdict = check(d, config, window, chain if inside else ChainState(), *scales[number % len(scales)])
            status, chain = verdict.status, verdict.chain
        if observed is not None and inside and not closed and status != observed[number] == Status.CHAIN_BROKEN:
            status, closed = Status.CHAIN_BROKEN, True
        yield int(status)
        inside = bool(d.chain)
        closed = closed and inside
        failed = inside and status != Status.OK


def random_setup(config: NdpConfig, base: int, limit: int, rng: random.Random) -> RingSetup:
    """Rings somewhere in ``[base, limit)``, mostly such that the device accepts them."""
    depth = rng.choice([2, 3, 5, 8, 16, 31])
    ring = depth << SLOT_LOG2
    lower = base + rng.randrange(0, 16) * config.stripe_bytes
    upper = limit - rng.choice([0, 64, 192, 1024])
    submission = lower + rng.randrange(0, 8) * config.stripe_bytes
    setup = RingSetup(lower, upper, depth, submission, SLOT_LOG2, submission + ring + rng.randrange(8) * 64, SLOT_LOG2)
    wrong = rng.choice(
        [
            {"depth": rng.choice([0, 1, 4097, 1 << 31])},
            {"limit": setup.result_base + ring - 1},
            {"limit": rng.getrandbits(64)},
            {"base": setup.submission_base + 1},
            {"submission_base": setup.submission_base + 64},
            {"submission_base": rng.getrandbits(64)},
            {"result_base": setup.result_base + 32},
            {"result_base": upper - 64},
            {"submission_slot_log2": rng.choice([0, 10, 25, 31])},
            {"result_slot_log2": rng.choice([0, 10, 25, 31])},
        ]
    )
    return setup if rng.random() < 0.7 else replace(setup, **wrong)


def random_pokes(config: NdpConfig, count: int, rng: random.Random, *, closing: bool) -> list[tuple[int, int]]:
    """Register writes of somebody who may reach his own queue, and those global ones that change no status.

    And addresses where nothing is, or nothing to be written. ``closing``: also registers that close chains, and the
    watchdog, from `SLOWEST_ANSWER` cycles on (a shorter period would fail accesses that memory does answer).
    """
    own = [queue_offset(HOSTILE, r.name) for r in QUEUE if r.name not in ("CTRL", "CQ_HEAD")]
    common = [global_offset(name) for name in ("POLL_INTERVAL", "SHARE", "MSIX")]
    common += [vector_offset(v, r.name) for v in range(config.queues) for r in VECTOR]
    absent = [*range(0xF000, 1 << MMIO_BITS, 4), *range(PENDING_BASE, PENDING_BASE + 64, 4)]
    absent += [queue_offset(HOSTILE, r.name) for r in QUEUE if r.access is Access.RO]
    absent += [r.offset for r in GLOBAL if r.access is Access.RO]
    places = [own, own, common, absent]
    if closing:
        places += [[global_offset(name) for name in ("CHAIN_LIMIT", "CHAIN_TIMEOUT", "WATCHDOG")]]
    pokes = []
    for _ in range(count):
        offset = rng.choice(rng.choice(places))
        value = rng.choice([0, 1, 0xFFFF_FFFF, rng.getrandbits(32), 1 << rng.randrange(32)])
        if offset == global_offset("WATCHDOG") and 0 < value < SLOWEST_ANSWER:
            value += SLOWEST_ANSWER
        pokes.append((offset, value))
    return pokes


def random_scales(device: RtlDevice, setup: RingSetup, rng: random.Random) -> list[Scale]:
    """Give each slot of the submission ring a softmax scale and exponents, and noise in what line 0 does not use."""
    edges = [1.0, 2.0**-24, 2.0**-25, 255.0, 256.0, 0.0, -1.0, math.inf, math.nan]
    scales: list[Scale] = []
    for slot in range(setup.depth):
        scale = rng.getrandbits(32)
        if rng.random() < 0.7:
            (scale,) = struct.unpack("<I", struct.pack("<f", rng.choice(edges)))
        numbers = Exponents(*(rng.choice([0, 1, -1, 39, 40, 127, -128]) for _ in Exponents._fields))
        if rng.random() < 0.5:
            numbers = Exponents()
        noise = struct.pack("3b", *numbers) + rng.randbytes(VALID_OFFSET - EXPONENTS_OFFSET - 3)
        place = setup.submission_base + (slot << setup.submission_slot_log2)
        device.poke(place + SOFTMAX_SCALE_OFFSET, scale.to_bytes(4, "little") + noise)
        scales.append((scale, numbers))
    return scales


@dataclass
class Tally:
    """What a run has seen."""

    descriptors: int = 0
    cycles: int = 0
    seconds: float = 0.0
    """Processor time of the simulation alone."""
    setups_refused: int = 0
    setups: int = 0
    longest_wait_of_the_victim: int = 0
    chains_closed: int = 0
    """By CHAIN_LIMIT and CHAIN_TIMEOUT."""
    statuses: Counter[int] = field(default_factory=Counter)


def run(device: RtlDevice, config: NdpConfig, *, descriptors: int, a_round: int, seed: int, executes: bool) -> Tally:
    """Put ``descriptors`` through two queues in rounds of ``a_round`` and hold every one to the specification.

    One queue is hostile. The other, whose window lies beside, gets descriptors that mostly are legal. In every
    round the memory ports may touch only: line 0 of either's submission slots and completion lines (queue
    engine), and the windows (core); nothing of the victim's while the victim has nothing to do.
    """
    rng, wide = random.Random(seed), np.random.default_rng(seed)
    tally = Tally()
    half = 1 << 18
    passes = iter(range(1, 1 << 24, 1 << 12))
    while tally.descriptors < descriptors:
        alone = rng.random() < 0.3
        # The first allows nothing: a list without any would allow all.
        windows = [AllowedWindow(0, 0, ())]
        loads: list[RingLoad] = []
        everything: list[tuple[Columns, list[Scale]]] = []
        for queue in (HOSTILE,) if alone else (HOSTILE, VICTIM):
            base = half * (1 + queue)
            setup = random_setup(config, base, base + half, rng)
            load = RingLoad(queue, setup, next(passes), np.zeros((0, PACKED_BYTES), np.uint8))
            accepted = ring_setup_allowed(config, setup)
            tally.setups += 1
            tally.setups_refused += not accepted
            slots = range(setup.depth if accepted else 0)
            windows += [
                AllowedWindow(place, place + 64, (QUEUES,), reads, not reads)
                for reads, first, log2 in (
                    (True, setup.submission_base, setup.submission_slot_log2),
                    (False, setup.result_base, setup.result_slot_log2),
                )
                for place in (first + (slot << log2) for slot in slots)
            ]
            if accepted and executes:
                windows.append(AllowedWindow(setup.base, setup.limit, (CORE,)))
            device.allow(windows)
            assert enable(device, load, weight=rng.choice([0, 1, 7, 255])) == accepted, (setup, seed)
            if accepted:
                count = min(a_round, max(2, descriptors - tally.descriptors))
                plausible = columns_of(plausible_descriptors(config, setup, 400, rng))
                columns = hostile_columns(plausible, count, setup, wide)
                load.descriptors = packed(columns)
                loads.append(load)
                everything.append((columns, random_scales(device, setup, rng)))
        device.allow(windows)
        before, started = device.cycles, time.process_time()
        closing = rng.random() < 0.3
        pokes = random_pokes(config, a_round // 20, rng, closing=closing)
        drive_rings(device, loads, pokes=pokes, seed=rng.getrandbits(32))
        tally.seconds += time.process_time() - started
        tally.cycles += device.cycles - before
        for load, (columns, scales) in zip(loads, everything, strict=True):
            _compare(config, load, columns, scales, tally, seed, closing=closing)
        for name, value in RESET.items():
            device.mmio_write(global_offset(name), value)
        assert not device.mmio_read(global_offset("WATCHDOG_TRIPS")), seed
        for queue in (HOSTILE, VICTIM):
            disable(device, queue)
    return tally


def _compare(
    config: NdpConfig,
    load: RingLoad,
    columns: Columns,
    scales: list[Scale],
    tally: Tally,
    seed: int,
    *,
    closing: bool,
) -> None:
    assert load.statuses is not None
    count = len(load.statuses)
    expected = np.fromiter(expected_statuses(config, load.setup, columns, scales), np.uint8, count)
    if closing:
        strict, observed = expected, load.statuses.tolist()
        expected = np.fromiter(expected_statuses(config, load.setup, columns, scales, observed), np.uint8, count)
        tally.chains_closed += int(np.count_nonzero((expected == Status.CHAIN_BROKEN) & (strict != expected)))
    differs = np.flatnonzero(expected != load.statuses)
    if differs.size:
        first = int(differs[0])
        d = Descriptor(*(int(columns[f.name][first]) for f in FIELDS))
        raise AssertionError(
            f"seed {seed}, queue {load.queue}, descriptor {first}: the device says {load.statuses[first]}, the"
            f" specification {Status(int(expected[first])).name}: {d.describe()} {d}, {load.setup}"
        )
    tally.descriptors += len(expected)
    tally.statuses.update(expected.tolist())
    if load.queue == VICTIM:
        tally.longest_wait_of_the_victim = max(tally.longest_wait_of_the_victim, load.longest_wait_cycles)
