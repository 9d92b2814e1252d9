"""The RTL vouches for the model: recorded hosts and random streams on both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import DType
from plora.hw.defs.status import Status
from plora.sim.calibration.device import stream_of
from plora.sim.calibration.device_cases import cases
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.predict import predict_stream
from plora.sim.device.record import Call, RecordingPort, play
from plora.sim.device.stream import lines_of, place
from plora.sim.device.timed import TimedDevice
from plora.sim.functional.device import FunctionalDevice
from plora.sim.golden.bf16 import from_float, to_float
from plora.sw.matrix import multiply, multiply_twice, store_matrix
from plora.sw.session import Session, open_session
from plora.sw.stream_run import differences, run_stream

TINY = preset("tiny")
MEMORY_BYTES = 1 << 23


def one_product(session: Session) -> None:
    rng = np.random.default_rng(1)
    w = store_matrix(session.driver, session.allocator, rng.standard_normal((40, 300)).astype(np.float16), "W")
    multiply(session.queue, w, rng.standard_normal((3, 300)).astype(np.float16))


def adapters(session: Session) -> None:
    rng = np.random.default_rng(2)
    a = store_matrix(session.driver, session.allocator, rng.standard_normal((16, 300)).astype(np.float16), "A")
    b = store_matrix(session.driver, session.allocator, rng.standard_normal((500, 16)).astype(np.float16), "B")
    for rows in (1, 20):
        multiply_twice(session.queue, a, b, rng.standard_normal((rows, 300)).astype(np.float16))


def bf16_adapter(session: Session) -> None:
    """One whose results are right only with its exponents."""
    rng = np.random.default_rng(3)
    a, b, x = (from_float(1e-3 * rng.standard_normal(shape)) for shape in ((16, 300), (90, 16), (3, 300)))
    placed = [store_matrix(session.driver, session.allocator, matrix, "W", DType.BF16) for matrix in (a, b)]
    y = to_float(multiply_twice(session.queue, placed[0], placed[1], x).y)
    exact = to_float(x) @ to_float(a).T @ to_float(b).T
    np.testing.assert_allclose(y, exact, rtol=2.0**-6, atol=2.0**-7 * np.abs(exact).max())


def test_the_timed_device_computes_bf16_as_the_functional_one() -> None:
    bf16_adapter(open_session(TimedDevice(TINY, memory_bytes=MEMORY_BYTES), memory_bytes=MEMORY_BYTES, depth=8))


def record(host: Callable[[Session], None]) -> list[Call]:
    """The calls of the driver, with waits that suit the RTL."""
    port = RecordingPort(FunctionalDevice(TINY, MEMORY_BYTES))
    session = open_session(port, memory_bytes=MEMORY_BYTES, depth=8)
    host(session)
    port.wait(20_000)
    return port.calls


@pytest.mark.parametrize("host", [one_product, adapters, bf16_adapter])
@pytest.mark.parametrize("latencies", [(40, 20), (150, 80)])
def test_a_recorded_host_finds_the_same_order_and_times(
    host: Callable[[Session], None], latencies: tuple[int, int]
) -> None:
    calls = record(host)
    read, write = latencies
    with RtlDevice(TINY, dram_bytes=MEMORY_BYTES, read_latency_cycles=read, write_latency_cycles=write) as rtl:
        measured = play(calls, rtl, rtl.peek)
    model = TimedDevice(TINY, MemoryTiming(read, write), MEMORY_BYTES)
    predicted = play(calls, model, model.memory.read)
    assert [(c.queue, c.number, c.status) for c in predicted.completions] == [
        (c.queue, c.number, c.status) for c in measured.completions
    ]
    begin = measured.call_cycles[0]
    for ours, theirs in zip(predicted.completions, measured.completions, strict=True):
        allowed = max(8, 0.03 * (theirs.cycle - begin))
        assert ours.cycle >= theirs.since - allowed, f"descriptor {theirs.number}"
        assert ours.since <= theirs.cycle + allowed, f"descriptor {theirs.number}"
        # Lines of the host meet those of the device on the same channel, or not, by a cycle more or less before: that
        # moves up to 11 cycles of one descriptor here, whatever the latencies, and evens out over a few.
        assert ours.span_cycles == pytest.approx(theirs.span_cycles, rel=0.03, abs=12)
    spans = [sum(c.span_cycles for c in run.completions) for run in (predicted, measured)]
    assert spans[0] == pytest.approx(spans[1], rel=0.03, abs=8)
    assert predicted.call_cycles[-1] == pytest.approx(measured.call_cycles[-1], rel=0.01, abs=8)


@pytest.mark.parametrize(
    ("tiles", "head_dim", "rows", "dtype"),
    [
        *(([100], 64, 1, "fp16"), ([250], 64, 4, "fp16"), ([160, 140], 128, 2, "fp16"), ([500], 16, 2, "fp16")),
        *(([33], 32, 2, "fp16"), ([33], 32, 2, "int4"), ([160, 140], 128, 2, "int8"), ([500], 17, 1, "int4")),
        *(([100], 64, 3, "int8"), ([250], 100, 4, "int4")),
    ],
)
def test_a_head_of_attention_takes_the_predicted_cycles(tiles: list[int], head_dim: int, rows: int, dtype: str) -> None:
    """Every descriptor within two cycles, where nothing but its chain is under way."""
    common = {"gpu_rows": rows, "chain": 1, "op": "softmax", "device_columns": head_dim, "dtype": dtype}
    lines: list[dict[str, object]] = [
        {**common, "device_rows": n, "keep": "append" if i else "new", "source": "chain" if i else "slot"}
        for i, n in enumerate(tiles)
    ]
    values = {"device_rows": head_dim, "device_columns": sum(tiles), "transpose": 1, "source": "kept"}
    stream = place(TINY, lines_of([*lines, {**values, "gpu_rows": rows, "dtype": dtype}]))
    timing = MemoryTiming(40, 20)
    predicted = predict_stream(stream, timing)
    with RtlDevice(TINY, read_latency_cycles=40, write_latency_cycles=20) as rtl:
        run = run_stream(stream, rtl, settle_cycles=500)
        assert not list(differences(stream, rtl))
    for ours, theirs in zip(predicted, run.finished, strict=True):
        assert ours.status == theirs.status == Status.OK
        assert ours.completed_cycle == pytest.approx(theirs.completed_cycle, abs=2), ours.entry


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_heads_that_take_turns_take_the_predicted_cycles(rows: int) -> None:
    """In one chain, V of each after the scores of the next; those of the short heads hold its results up."""
    tokens, head_dim = [100, 32, 250, 16, 200, 33, 256], 64
    common = {"gpu_rows": rows, "chain": 1}
    scores = [{**common, "op": "softmax", "device_rows": n, "device_columns": head_dim, "keep": "new"} for n in tokens]
    values = [{**common, "device_rows": head_dim, "device_columns": n, "transpose": 1} for n in tokens]
    lines: list[dict[str, object]] = [scores[0]]
    for following, value in zip(scores[1:], values, strict=False):
        lines += [following, {**value, "source": "previous"}]
    lines.append({**values[-1], "source": "kept", "chain": 0})
    stream = place(TINY, lines_of(lines))
    timing = MemoryTiming(40, 20)
    predicted = predict_stream(stream, timing)
    with RtlDevice(TINY, read_latency_cycles=40, write_latency_cycles=20) as rtl:
        run = run_stream(stream, rtl, settle_cycles=500)
        assert not list(differences(stream, rtl))
    for ours, theirs in zip(predicted, run.finished, strict=True):
        assert ours.status == theirs.status == Status.OK
        assert ours.completed_cycle == pytest.approx(theirs.completed_cycle, abs=8, rel=0.03), ours.entry


@pytest.mark.parametrize("number", range(10))
def test_random_streams_take_the_predicted_cycles_and_leave_the_golden_bits(number: int) -> None:
    (case,) = cases("tiny", 1, first=9 * number, max_beats=1500)
    stream = stream_of(case)
    assert case.timing.stall == 0.0
    predicted = predict_stream(stream, case.timing)
    with RtlDevice(
        TINY,
        dram_bytes=1 << TINY.dpa_bits,
        read_latency_cycles=int(case.timing.read_latency_cycles),
        write_latency_cycles=int(case.timing.write_latency_cycles),
    ) as rtl:
        run = run_stream(stream, rtl, settle_cycles=500)
        assert not list(differences(stream, rtl))
    for ours, theirs in zip(predicted, run.finished, strict=True):
        assert ours.status == theirs.status
        allowed = max(8, 0.03 * theirs.completed_cycle)
        assert ours.completed_cycle == pytest.approx(theirs.completed_cycle, abs=allowed), f"{case.kind}, {ours.entry}"
