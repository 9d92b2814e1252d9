"""Descriptor streams: what a file may say, and where a stream lies in memory."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor, Keep, Op, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import ChainState, QueueWindow, check, ring_setup_allowed
from plora.hw.defs.packing import pack_geometry, pack_geometry_transposed
from plora.hw.defs.queue import softmax_scale, softmax_scale_of, softmax_scale_value
from plora.hw.defs.status import Status
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.predict import predict_stream
from plora.sim.device.stream import format_stream, lines_of, parse_stream, place, read_stream

SMALL = preset("small")
JSONL = """\
# two matrices of an adapter
{"device_rows": 16, "device_columns": 4096, "chain": 1, "keep": "new"}

{"device_rows": 4096, "device_columns": 16, "source": "kept", "queue": 2, "seed": 7}
"""
CSV = """\
device_rows, device_columns, chain, keep, source, queue, seed
16, 4096, 1, new, , ,
4096, 16, , , kept, 2, 7
"""


def test_json_lines_and_csv_say_the_same() -> None:
    assert [line.values for line in parse_stream(JSONL)] == [line.values for line in parse_stream(CSV)]
    first, second = parse_stream(JSONL)
    assert first.values == {"device_rows": 16, "device_columns": 4096, "chain": 1, "keep": Keep.NEW}
    assert second.values["source"] == Source.KEPT
    assert (first.number, second.number) == (2, 4)


def test_what_is_written_reads_back() -> None:
    lines = parse_stream(JSONL)
    assert [line.values for line in parse_stream(format_stream(lines))] == [line.values for line in lines]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no descriptors"),
        ("# nothing\n", "no descriptors"),
        ('{"device_rows": 4}', "line 1: device_columns is missing"),
        ('{"device_rows": 4, "device_columns": 4, "speed": 1}', "unknown field 'speed'"),
        ('{"device_rows": 4, "device_columns": -1}', "give 0 ..."),
        ('{"device_rows": 4, "device_columns": 1048576}', "give 0 ... 1048575"),
        ('{"device_rows": "four", "device_columns": 4}', "device_rows is 'four'; give an integer"),
        ('{"device_rows": 4, "device_columns": 4, "keep": "perhaps"}', "none, new, append"),
        ('{"device_rows": 4, "device_columns": 4.5}', "give an integer"),
        ('{"device_rows": 4', "line 1: not JSON"),
        ('{"device_rows": 4, "device_columns": 4}\n[1]', "line 2: '\\[1\\]' is not a JSON object"),
        ("device_rows,device_columns\n1,2\n1,2,3", "line 3: 3 values for 2 columns"),
        ("device_rows,device_columns\n", "a header and no descriptors"),
        ("hello", "a header and no descriptors"),
    ],
)
def test_a_bad_line_is_named_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_stream(text, "s.txt")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_stream(tmp_path / "none.jsonl")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        read_stream(binary)


def test_defaults_make_a_legal_descriptor() -> None:
    stream = place(SMALL, lines_of([{"device_rows": 40, "device_columns": 300}]))
    d = stream.entries[0].descriptor
    assert d == Descriptor(
        op=Op.GEMV,
        device_rows=40,
        device_columns=300,
        gpu_rows=1,
        gpu_columns=300,
        gpu_bytes=600,
        device_bytes=pack_geometry(SMALL, 40, 300).packed_bytes,
        device_address=d.device_address,
    )
    assert check(d, SMALL, stream.rings[0].window).status is Status.OK


HEAD = [
    {"op": "softmax", "device_rows": 64, "device_columns": 40, "gpu_rows": 3, "keep": "new", "chain": 1},
    {
        "op": "softmax", "device_rows": 30, "device_columns": 40, "gpu_rows": 3, "keep": "append", "chain": 1,
        "source": "chain", "softmax_scale": 0.25,
    },
    {"device_rows": 40, "device_columns": 94, "gpu_rows": 3, "source": "kept", "transpose": 1},
]  # fmt: skip


def test_a_head_of_attention_is_a_legal_chain_with_the_ordinary_scale() -> None:
    stream, state = place(SMALL, lines_of(HEAD)), ChainState()
    for entry in stream.entries:
        window = stream.rings[0].window
        verdict = check(entry.descriptor, SMALL, window, state, entry.softmax_scale)
        assert verdict.status is Status.OK
        state = verdict.chain
    scales = [softmax_scale_value(entry.softmax_scale) for entry in stream.entries]
    assert scales == [pytest.approx(math.log2(math.e) / math.sqrt(40), rel=1e-5), 0.25, 0.0]
    assert softmax_scale_of(stream.entries[1].submission_line(7)) == softmax_scale(0.25)
    values = stream.entries[2].descriptor
    assert values.device_bytes == pack_geometry_transposed(SMALL, 40, 94).packed_bytes()


def test_scales_are_numbers_in_files_of_both_kinds_and_written_back() -> None:
    lines = lines_of(HEAD)
    assert parse_stream(format_stream(lines)) == lines
    table = "device_rows,device_columns,op,softmax_scale\n4,4,softmax,0.25\n4,4,softmax,\n4,4,softmax,0\n"
    scales = [line.values.get("softmax_scale") for line in parse_stream(table)]
    assert scales == [softmax_scale(0.25), None, 0]
    for bad, message in (
        ("x", "softmax_scale is 'x'; give a number"),
        ("256", "softmax scale 256"),
        ("nan", "scale nan"),
    ):
        with pytest.raises(UserError, match=f"line 2: .*{message}"):
            parse_stream(f"device_rows,device_columns,softmax_scale\n4,4,{bad}\n", "s.csv")


def test_rings_and_operands_do_not_overlap_and_fit_their_contents() -> None:
    rows = [
        {"device_rows": n, "device_columns": 700, "gpu_rows": b, "queue": n % 4} for n in (5, 6, 7, 40) for b in (1, 5)
    ]
    stream = place(SMALL, lines_of(rows))
    spans = []
    for ring in stream.rings.values():
        assert ring_setup_allowed(SMALL, ring)
        spans.append((ring.submission_base, ring.depth << ring.submission_slot_log2))
        spans.append((ring.result_base, ring.depth << ring.result_slot_log2))
    for entry in stream.entries:
        assert check(entry.descriptor, SMALL, stream.rings[entry.queue].window).status is Status.OK
        spans.append((entry.descriptor.device_address, entry.descriptor.device_bytes))
    spans.sort()
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))


def test_operands_of_one_shape_and_seed_are_shared() -> None:
    row = {"device_rows": 8, "device_columns": 64}
    stream = place(SMALL, lines_of([row, row, {**row, "seed": 1}, {**row, "gpu_rows": 2, "seed": 1}]))
    addresses = [entry.descriptor.device_address for entry in stream.entries]
    assert addresses[0] == addresses[2] == addresses[3] != addresses[1]


def test_a_given_address_is_kept_and_must_not_lie_in_the_rings() -> None:
    row = {"device_rows": 8, "device_columns": 64}
    stream = place(SMALL, lines_of([{**row, "device_address": "0x100000"}]))
    assert stream.entries[0].descriptor.device_address == 0x100000
    with pytest.raises(UserError, match="lies in the rings"):
        place(SMALL, lines_of([{**row, "device_address": 0}]))


def test_a_queue_or_a_memory_that_the_device_has_not_is_refused() -> None:
    with pytest.raises(UserError, match="queue is 4"):
        place(SMALL, lines_of([{"device_rows": 8, "device_columns": 64, "queue": 4}]))
    tiny = preset("tiny")
    rows = [{"device_rows": 64, "device_columns": 4096}] * 40
    with pytest.raises(UserError, match="share an operand"):
        place(tiny, lines_of(rows))
    assert isinstance(stream_window := place(tiny, lines_of(rows[:4])).rings[0].window, QueueWindow)
    assert stream_window.base == 0


def test_more_descriptors_than_a_ring_has_slots_are_predicted() -> None:
    stream = place(SMALL, lines_of([{"device_rows": 4, "device_columns": 40, "seed": 1}] * 5000))
    assert stream.rings[0].depth == 4096
    predicted = predict_stream(stream, MemoryTiming())
    assert len(predicted) == 5000
    completed = [p.completed_cycle for p in predicted]
    assert completed == sorted(completed)
    # Each step of a long stream of equal descriptors takes the same.
    assert completed[4999] - completed[2999] == pytest.approx(completed[2999] - completed[999], rel=0.01)
