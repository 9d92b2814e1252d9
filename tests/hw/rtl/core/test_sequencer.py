"""The order of beats, what each reads, and where its results go; the gate that jobs pass before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import DOT_LANES, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import DType
from plora.hw.defs.packing import (
    ceil_div,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.hw.rtl.core.gate import JobGate
from plora.hw.rtl.core.job import (
    FINISHED,
    SCALE_USED_BITS,
    SOFTMAX_PAIRS,
    Destination,
    Region,
    input_capacity,
    result_tag_layout,
    work_layout,
)
from plora.hw.rtl.core.operand_loader import issued_layout
from plora.hw.rtl.core.sequencer import BeatSequencer, granted_layout
from tests.hw.rtl.core.bench import TINY, simulate

EIGHT_CHANNELS = replace(TINY, name="tiny-8", channels=8, input_buffer_bytes=1 << 15)


def random_job(config: NdpConfig, rng: random.Random) -> dict[str, Any]:
    """Dimensions and flags of a job such as the decoder lets pass, with its work."""
    token_wise = rng.random() < 0.3
    softmax = not token_wise and rng.random() < 0.3
    from_kept = token_wise or (not softmax and rng.random() < 0.3)
    k = rng.choice([1, 8, 9, 16, 17, 33, 64, 250] + ([] if from_kept or softmax else [300, 700]))
    n, b = rng.choice([1, 2, 3, 5, 17, 40]), rng.choice([1, 1, 2, 3, 5])
    if (token_wise or softmax) and k > WORD_VALUES // 2 and rng.random() < 0.6:
        dtype = rng.choice([DType.INT8, DType.INT4])
        n, k = (n, rng.choice([k, 300])) if token_wise else (rng.choice([n, 200]), k)
    else:
        dtype = DType.FP16
    g: Any = (pack_geometry_transposed if token_wise else pack_geometry)(config, n, k, dtype)
    if g.beats > config.dram_buffer_stripes:
        b = min(b, 2)
    tap_lanes, split = (DOT_LANES, 1) if token_wise else (g.tap_lanes, g.split)
    destination = rng.choice(list(Destination))
    if token_wise and destination is Destination.KEPT:
        destination = Destination.MEMORY
    continues = int(rng.random() < 0.3)
    if g.groups > 1 or b > 2 or softmax or (not token_wise and g.taps > 1):
        continues = 0
        destination = destination if destination is not Destination.ACCUMULATORS else Destination.MEMORY
    if softmax:
        destination = Destination.KEPT
    pairs = ceil_div(b, 2)
    bank = rng.getrandbits(1) if softmax or token_wise else 0
    work = {
        "from_kept": int(from_kept),
        "load": int(not from_kept),
        "row_stripes": operand_row_stripes(config, k),
        "pairs": pairs,
        "single": b % 2,
        "stripes": g.stripes,
        "groups": g.groups,
        "beats": g.beats,
        "expansion": g.expansion_log2,
        "tap": 0 if token_wise else {32: 0, 16: 1, 8: 2}[g.tap_lanes],
        "split_log2": split.bit_length() - 1,
        "tail": k - (g.beats - 1) * split * tap_lanes,
        "group_rows": g.group_rows,
        "last_rows": n - (g.groups - 1) * g.group_rows,
        "continues": continues,
        "destination": destination,
        "kept_stride": config.kept_stride(pairs, softmax=softmax or token_wise),
        "bank": bank,
        "kept_word": bank * config.bank_words + rng.randint(0, 2)
        if destination is Destination.KEPT or token_wise
        else 0,
        "row_words": result_row_words(n, transpose=token_wise),
        "token_wise": int(token_wise),
        "softmax": int(softmax),
        "begins": rng.getrandbits(1),
        "scale": rng.getrandbits(SCALE_USED_BITS),
    }
    half = rng.choice([Region.HALF_0, Region.HALF_1])
    return {"n": n, "k": k, "b": b, "g": g, "split": split, "base": rng.randrange(input_capacity(config)),
            "work": work, "region": Region.KEPT if destination is Destination.KEPT else half}  # fmt: skip


def place_of(config: NdpConfig, job: dict[str, Any], group: int, t: int) -> tuple[int, int, int | None]:
    """Stripe of beat t of a group, the beat's place in it, and the stripe of scales if the beat begins a frame."""
    g, log2 = job["g"], job["work"]["expansion"]
    if not log2:
        return group * g.beats + t, 0, None
    if job["work"]["token_wise"]:
        start, beat, frame_beats = group * g.group_stripes, t, 4 * config.channels
    else:
        start, beat, frame_beats = 0, group * g.beats + t, 64 * g.beats
    frame, rest = divmod(beat, frame_beats)
    scales = start + frame * (1 + (frame_beats >> log2))
    return scales + 1 + (rest >> log2), rest % (1 << log2), scales if rest == 0 else None


def expected_beats(config: NdpConfig, job: dict[str, Any], position: int) -> Iterator[dict[str, Any]]:
    """The beats of ``job``, whose weights begin at ``position``, in order; stripes of scales too."""
    depth = 2 * config.dram_buffer_stripes
    beats = list(beats_without_scales(config, job, position))
    # A stripe is given back with its last use.
    last_uses = {beat["stripe"]: index for index, beat in enumerate(beats)}
    held_scales = {}
    for index, beat in enumerate(beats):
        beat["weights_last_use"] = last_uses[beat["stripe"]] == index
        if beat["scales_before"] is not None:
            held_scales[beat["scales_before"]] = index
    for index, beat in enumerate(beats):
        stripe = beat["scales_before"]
        if stripe is not None and (job["work"]["token_wise"] or beat["first_pair"]):
            last_pass = not job["work"]["token_wise"] or held_scales[stripe] == index
            yield {"stripe": stripe, "position": stripe % depth, "scales": True, "weights_last_use": last_pass}
        yield beat


def beats_without_scales(config: NdpConfig, job: dict[str, Any], position: int) -> Iterator[dict[str, Any]]:
    """The beats that the array sees."""
    g, work, capacity = job["g"], job["work"], input_capacity(config)
    kept, token_wise = job["region"] == Region.KEPT, work["token_wise"]
    for group in range(g.groups):
        for pair in range(work["pairs"]):
            for t in range(g.beats):
                word = t * job["split"]
                first_value = group * g.group_rows
                row_word = pair * (work["kept_stride"] if kept else work["row_words"])
                row_word += work["kept_word"] if kept else 0
                kept_row = pair * work["kept_stride"]
                stripe, sub, scales_before = place_of(config, job, group, t)
                stripe += position
                last_group = group == g.groups - 1
                yield {
                    "scales": False,
                    "first_pair": pair == 0,
                    "scales_before": None if scales_before is None else position + scales_before,
                    "sub": sub,
                    "weights_read": t == 0 or sub == 0,
                    "scales_step": token_wise or (t == g.beats - 1 and pair == work["pairs"] - 1),
                    "stripe": stripe,
                    "position": stripe % (2 * config.dram_buffer_stripes),
                    "address": None
                    if work["from_kept"]
                    else (job["base"] + pair * work["row_stripes"] + word // config.channels) % capacity,
                    "kept": (kept_row + work["kept_word"] + t // 2 if token_wise else kept_row + t) % config.kept_words,
                    "part": word % config.channels,
                    "partial": t == g.beats - 1,
                    "first": t == 0 and not work["continues"],
                    "last": t == g.beats - 1 and work["destination"] is not Destination.ACCUMULATORS,
                    "second_row": not (work["single"] and pair == work["pairs"] - 1),
                    "upper_half": token_wise and t % 2,
                    "pause": (2 if last_group else 1) if token_wise else work["softmax"],
                    "states": work["bank"] * SOFTMAX_PAIRS + pair if token_wise and t == 0 else None,
                    "word": row_word + first_value // WORD_VALUES,
                    "lane": first_value % WORD_VALUES,
                    "rows": min(g.group_rows, job["n"] - first_value),
                    "state": work["bank"] * SOFTMAX_PAIRS + pair,
                    "softmax": work["softmax"],
                    "begins": work["begins"] and group == 0,
                    "scale": work["scale"],
                    "anchor": token_wise and last_group,
                    "end": last_group and pair == work["pairs"] - 1,
                }


@settings(max_examples=12)
@given(st.sampled_from([TINY, EIGHT_CHANNELS]), st.sampled_from([(0.0, 1.0), (0.5, 0.4)]), st.integers(0, 999))
def test_beats_come_group_by_group_pair_by_pair(config: NdpConfig, moods: tuple[float, float], seed: int) -> None:
    stall, arrival = moods
    rng = random.Random(seed)
    dut = BeatSequencer(config)
    jobs = [random_job(config, rng) for _ in range(4)]
    beats: list[list[dict[str, Any]]] = []
    position = 0
    for job in jobs:
        beats.append(list(expected_beats(config, job, position)))
        position += job["g"].stripes
    total_stripes = position
    span = {"beat": 0, "span": 0, "stall_weights": 0, "stall_drain": 0}
    depth = config.dram_buffer_stripes
    freed = arrived = scores = 0

    async def source(ctx: Any) -> None:
        for number, job in enumerate(jobs):
            granted = {"work": job["work"], "slot": number, "operand_base": job["base"], "region": job["region"]}
            ctx.set(dut.jobs.payload, granted_layout(config).const(granted))
            ctx.set(dut.jobs.valid, 1)
            await ctx.tick().until(dut.jobs.ready)
            ctx.set(dut.jobs.valid, 0)

    async def sink(ctx: Any) -> None:
        nonlocal freed, arrived, scores
        for number, job in enumerate(jobs):
            shown = None  # the stripe that the input buffer shows
            cycles, begun = 0, False
            for index, want in enumerate(beats[number]):
                fired = False
                while not fired:
                    if arrived < total_stripes and arrived - freed < depth and rng.random() < arrival:
                        arrived += 1
                    ready = rng.random() >= stall
                    # No more are ever in array and softmax unit than the sequencer counts.
                    ahead = scores > 0 and (scores > 40 or rng.random() < 0.1)
                    ctx.set(dut.scores_ahead, ahead)
                    ctx.set(dut.arrived, arrived % (2 * depth))
                    ctx.set(dut.issue.ready, ready)
                    *_, valid, beat, ended, activity = await ctx.tick().sample(
                        dut.issue.valid, dut.issue.payload, dut.ended, dut.activity
                    )
                    fired = bool(valid and ready)
                    begun |= fired
                    cycles += begun
                    for name in span:
                        span[name] += activity[name]
                    last = fired and index == len(beats[number]) - 1
                    assert ended.valid == last
                    assert not fired or want["stripe"] < arrived, "a beat before its weights"
                    completes = fired and not want["scales"] and want["last"]
                    assert not (completes and scores and not want["softmax"]), "results would overtake scores"
                    scores += bool(completes and want["softmax"]) - ahead
                freed += want["weights_last_use"]
                where = f"job {number} {job}, beat {index}"
                assert beat.control.weights_position == want["position"], where
                assert beat.control.weights_last_use == want["weights_last_use"], where
                assert beat.control.scales == want["scales"], where
                assert (beat.control.token_wise, beat.control.expansion) == (
                    job["work"]["token_wise"], job["work"]["expansion"],
                ), where  # fmt: skip
                if want["scales"]:
                    assert (beat.control.weights_read, beat.control.last) == (1, 0), where
                    assert not (beat.input_enable or beat.kept_enable or beat.state_enable), where
                    continue
                control, tag = beat.control, result_tag_layout(config).from_bits(beat.control.tag)
                state = beat.state_pair if beat.state_enable else None
                assert state == want["states"], where
                if want["address"] is None:
                    assert (beat.kept_enable, beat.input_enable) == (not want["upper_half"], 0), where
                    assert beat.kept_address == want["kept"], where
                else:
                    shown = beat.input_address if beat.input_enable else shown
                    assert (shown, beat.kept_enable) == (want["address"], 0), where
                    assert control.part == want["part"], where
                for name in ("partial", "first", "last", "second_row", "upper_half", "pause", "weights_read"):
                    assert control[name] == want[name], (where, name)
                if job["work"]["expansion"]:
                    assert (control.sub, control.scales_step) == (want["sub"], want["scales_step"]), where
                for name in ("tap", "split_log2", "tail", "from_kept"):
                    assert control[name] == job["work"][name], (where, name)
                for name in ("word", "lane", "rows", "state", "softmax", "begins", "scale", "anchor", "end"):
                    assert tag[name] == want[name], (where, name)
                assert (tag.region, tag.split_log2) == (job["region"], job["work"]["split_log2"])
            assert (ended.slot, ended.region, ended.cycles) == (number, job["region"], cycles)

    simulate(dut, source, sink, deadline_cycles=20_000)
    assert span["beat"] == sum(not beat["scales"] for of_job in beats for beat in of_job)
    assert span["span"] == span["beat"] + span["stall_weights"] + span["stall_drain"]


def test_one_cycle_lies_between_two_jobs_whose_weights_are_there() -> None:
    dut = BeatSequencer(TINY)
    work = {"pairs": 1, "groups": 1, "beats": 3, "destination": Destination.MEMORY}
    beats: list[int] = []

    async def bench(ctx: Any) -> None:
        ctx.set(dut.arrived, 9)
        ctx.set(dut.issue.ready, 1)
        ctx.set(dut.jobs.valid, 1)
        ctx.set(dut.jobs.payload, granted_layout(TINY).const({"work": work}))
        for _ in range(12):
            *_, beat = await ctx.tick().sample(dut.activity.beat)
            beats.append(beat)

    simulate(dut, bench)
    assert beats == [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]


class Gate:
    """A job gate with its inputs at rest, driven cycle by cycle."""

    def __init__(self, config: NdpConfig = TINY) -> None:
        self.config, self.dut = config, JobGate(config)

    def offer(self, ctx: Any, **job: Any) -> None:
        space = job.pop("space", 0)
        work = {"destination": Destination.MEMORY, **job}
        assert set(work) <= set(work_layout(self.config).members)
        ctx.set(self.dut.jobs.payload, issued_layout(self.config).const({"work": work, "operand_space": space}))
        ctx.set(self.dut.jobs.valid, 1)
        ctx.set(self.dut.granted.ready, 1)

    def granted(self, ctx: Any) -> bool:
        assert ctx.get(self.dut.granted.valid) == ctx.get(self.dut.jobs.ready)
        return bool(ctx.get(self.dut.granted.valid))


def test_a_loaded_operand_must_have_arrived_and_frees_the_one_before_it() -> None:
    gate = Gate()

    async def bench(ctx: Any) -> None:
        dut = gate.dut
        for arrivals, space in ((1, 3), (2, 5), (3, 7)):
            gate.offer(ctx, load=1, space=space, destination=Destination.ACCUMULATORS)
            assert not gate.granted(ctx)
            assert ctx.get(dut.waits_for_input)
            await ctx.tick()
            ctx.set(dut.arrivals, arrivals)
            assert gate.granted(ctx)
            assert not ctx.get(dut.waits_for_input)
            assert ctx.get(dut.freed) == {3: 0, 5: 3, 7: 5}[space]
            await ctx.tick()
            gate.offer(ctx, load=0, destination=Destination.ACCUMULATORS)  # shares the operand
            ctx.set(dut.completed, 1)
            assert gate.granted(ctx)
            assert ctx.get(dut.freed) == 0
            await ctx.tick()
            await ctx.tick()
            ctx.set(dut.completed, 0)

    simulate(gate.dut, bench)


def test_a_kept_operand_must_be_stored_to_its_last_value() -> None:
    gate = Gate()

    async def bench(ctx: Any) -> None:
        dut = gate.dut
        gate.offer(ctx, destination=Destination.KEPT)
        assert gate.granted(ctx)
        assert ctx.get(dut.granted.payload.region) == Region.KEPT
        await ctx.tick()
        gate.offer(ctx, from_kept=1)
        for _ in range(5):
            assert not gate.granted(ctx)
            assert ctx.get(dut.waits_for_input)
            await ctx.tick()
        ctx.set(dut.collected, 1)
        await ctx.tick()
        ctx.set(dut.collected, 0)
        assert gate.granted(ctx)

    simulate(gate.dut, bench)


def test_softmax_terms_are_weighed_only_when_the_states_of_their_rows_are_complete() -> None:
    gate = Gate()

    async def bench(ctx: Any) -> None:
        dut = gate.dut
        ctx.set(dut.softmax_busy, 1)
        gate.offer(ctx, from_kept=1)
        assert gate.granted(ctx)  # a plain intermediate does not ask for them
        for bank, busy, other in ((0, 0b01, 0b10), (1, 0b10, 0b01)):
            ctx.set(dut.softmax_busy, busy)
            gate.offer(ctx, from_kept=1, token_wise=1, bank=bank)
            assert not gate.granted(ctx)
            assert ctx.get(dut.waits_for_input)
            ctx.set(dut.softmax_busy, other)
            assert gate.granted(ctx)

    simulate(gate.dut, bench)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_terms_of_a_bank_are_taken_once_the_jobs_up_to_the_last_that_made_them_are_collected(seed: int) -> None:
    gate, rng = Gate(), random.Random(seed)

    async def bench(ctx: Any) -> None:
        dut = gate.dut
        uncollected: list[int | None] = []  # of each job in the array: the bank in which it keeps its results
        uncompleted = 0
        for _ in range(150):
            bank, kind = rng.getrandbits(1), rng.choice(["makes", "takes", "none"])
            if kind == "makes":
                gate.offer(ctx, destination=Destination.KEPT, softmax=1, bank=bank)
            elif kind == "takes":
                gate.offer(ctx, from_kept=1, token_wise=1, bank=bank, destination=Destination.MEMORY)
            else:
                gate.offer(ctx, destination=Destination.MEMORY)
            ctx.set(dut.half_freed, 0b11)
            for _ in range(rng.randint(1, 3)):
                collected, completed = bool(uncollected) and rng.random() < 0.4, uncompleted > len(uncollected)
                ctx.set(dut.collected, collected)
                ctx.set(dut.completed, completed)
                there = kind != "takes" or bank not in uncollected
                taken = gate.granted(ctx)
                assert taken == (there and uncompleted < FINISHED)
                await ctx.tick()
                if collected:
                    uncollected.pop(0)
                uncompleted += taken - completed
                if taken:
                    uncollected.append(bank if kind == "makes" else None)
                    break

    simulate(gate.dut, bench)


def test_result_halves_are_used_in_turn_and_waited_for() -> None:
    gate = Gate()

    async def bench(ctx: Any) -> None:
        dut = gate.dut
        gate.offer(ctx)
        for region in (Region.HALF_0, Region.HALF_1):
            assert gate.granted(ctx)
            assert ctx.get(dut.granted.payload.region) == region
            await ctx.tick()
        assert not gate.granted(ctx)
        ctx.set(dut.half_freed, 0b10)  # not the one whose turn it is
        await ctx.tick()
        assert not gate.granted(ctx)
        ctx.set(dut.half_freed, 0b01)
        await ctx.tick()
        ctx.set(dut.half_freed, 0)
        assert gate.granted(ctx)
        assert ctx.get(dut.granted.payload.region) == Region.HALF_0
        gate.offer(ctx, destination=Destination.KEPT)  # needs no half
        await ctx.tick()
        assert gate.granted(ctx)

    simulate(gate.dut, bench)


@pytest.mark.parametrize("destination", [Destination.KEPT, Destination.ACCUMULATORS])
def test_no_more_jobs_run_than_can_wait_for_completion(destination: Destination) -> None:
    gate = Gate()

    async def bench(ctx: Any) -> None:
        dut = gate.dut
        gate.offer(ctx, destination=destination)
        ctx.set(dut.collected, destination is Destination.KEPT)
        for _ in range(FINISHED):
            assert gate.granted(ctx)
            await ctx.tick()
        assert not gate.granted(ctx)
        ctx.set(dut.completed, 1)
        await ctx.tick()
        ctx.set(dut.completed, 0)
        assert gate.granted(ctx)

    simulate(gate.dut, bench)
