"""Descriptor streams as text, and where a stream's rings and operands lie in device memory.

A stream file has one descriptor a line, either JSON Lines or CSV with a header of field names. Only
``device_rows`` and ``device_columns`` are needed; docs/device-model.md lists every field and its default.
`place` lays a stream out the same way for every device that runs it, so that model and RTL see the same
addresses.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from plora.hw.defs.config import VALUE_BYTES, WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import FIELDS, Descriptor, DType, Keep, Op, Source, Type
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import RingSetup
from plora.hw.defs.packing import (
    ceil_div,
    expansion_log2,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.hw.defs.queue import (
    MAX_DEPTH,
    MAX_SLOT_LOG2,
    MIN_DEPTH,
    MIN_SLOT_LOG2,
    RESULT_OFFSET,
    operand_offset,
    ordinary_softmax_scale,
    softmax_scale,
    softmax_scale_value,
    submission_line,
)

_ENUMS: dict[str, type[IntEnum]] = {"type": Type, "op": Op, "dtype": DType, "source": Source, "keep": Keep}
_WIDTHS = {field.name: field.width for field in FIELDS}
_OWN = ("queue", "arrival_cycle", "seed", "softmax_scale")
FIELD_NAMES = (*_WIDTHS, *_OWN)
"""Fields that a line may have."""


@dataclass(frozen=True)
class Line:
    """One line of a stream file: the fields that it gives, checked, and its number in the file."""

    number: int
    values: Mapping[str, int]


@dataclass(frozen=True)
class Entry:
    """A descriptor of a stream, complete, and how it comes to the device."""

    line: int
    """Line of the file, from 1."""
    descriptor: Descriptor
    queue: int
    slot: int
    """Its place in the order of its queue, from 0."""
    arrival_cycle: int
    """Cycle, from the start of the run, at which the host publishes it."""
    seed: int
    """Of its operands' values."""
    softmax_scale: int = 0
    """FP32 bits."""

    def submission_line(self, ring_pass: int) -> bytes:
        """Line 0 of its slot."""
        return submission_line(self.descriptor, ring_pass, self.softmax_scale)


@dataclass(frozen=True)
class Stream:
    """A stream laid out in device memory: descriptors in the order of the file, and the rings of every queue used."""

    config: NdpConfig
    entries: tuple[Entry, ...]
    rings: Mapping[int, RingSetup]
    memory_bytes: int

    def submission_slot(self, entry: Entry) -> int:
        """DPA of the entry's submission slot."""
        ring = self.rings[entry.queue]
        return ring.submission_base + (entry.slot % ring.depth << ring.submission_slot_log2)

    def result_slot(self, entry: Entry) -> int:
        """DPA of the entry's result slot."""
        ring = self.rings[entry.queue]
        return ring.result_base + (entry.slot % ring.depth << ring.result_slot_log2)


def _scale(raw: object, where: str) -> int:
    """FP32 bits of the softmax scale that a line states as a number; 0 stays 0, for the device to refuse."""
    try:
        factor = float(raw)  # type: ignore[arg-type]
        return softmax_scale(factor) if factor else 0
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (TypeError, ValueError):
        raise UserError(f"{where}: softmax_scale is {raw!r}; give a number") from None


def _value(name: str, raw: object, where: str) -> int:
    if name == "softmax_scale":
        return _scale(raw, where)
    enum = _ENUMS.get(name)
    if isinstance(raw, str):
        text = raw.strip()
        if enum is not None and text.upper() in enum.__members__:
            return int(enum[text.upper()])
        try:
            raw = int(text, 0)
        except ValueError:
            known = f" or one of {', '.join(m.lower() for m in enum.__members__)}" if enum else ""
            raise UserError(f"{where}: {name} is {text!r}; give an integer{known}") from None
    if isinstance(raw, bool):
        raw = int(raw)
    if not isinstance(raw, int):
        raise UserError(f"{where}: {name} is {raw!r}; give an integer")
    limit = 1 << _WIDTHS.get(name, 63)
    if not 0 <= raw < limit:
        raise UserError(f"{where}: {name} is {raw}; give 0 ... {limit - 1}")
    return raw


def _line(number: int, raw: Mapping[str, object], where: str) -> Line:
    unknown = [key for key in raw if key not in FIELD_NAMES]
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(FIELD_NAMES)}")
    values = {name: _value(name, value, where) for name, value in raw.items() if value not in (None, "")}
    for needed in ("device_rows", "device_columns"):
        if needed not in values:
            raise UserError(f"{where}: {needed} is missing; every descriptor needs it")
    return Line(number, values)


def parse_stream(text: str, name: str = "stream") -> list[Line]:
    """Read a stream file's text: JSON Lines if its first line begins with ``{``, else CSV. ``#`` begins a comment line.

    Raises:
        UserError: no descriptor, or a line that cannot be read; the message names file, line and field.
    """
    numbered = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not numbered:
        raise UserError(f"{name}: no descriptors; give one a line")
    lines: list[Line] = []
    if numbered[0][1].lstrip().startswith("{"):
        for number, line in numbered:
            where = f"{name}, line {number}"
            try:
                raw = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON ({error}); give one object a line") from None
            if not isinstance(raw, dict):
                raise UserError(f"{where}: {line.strip()[:40]!r} is not a JSON object; give one object a line")
            lines.append(_line(number, raw, where))
        return lines
    reader = csv.reader(line for _, line in numbered)
    header = [column.strip() for column in next(reader)]
    for (number, _), row in zip(numbered[1:], reader, strict=True):
        where = f"{name}, line {number}"
        if len(row) != len(header):
            raise UserError(f"{where}: {len(row)} values for {len(header)} columns; give one value a column")
        lines.append(_line(number, dict(zip(header, (value.strip() for value in row), strict=True)), where))
    if not lines:
        raise UserError(f"{name}: a header and no descriptors; give one a line")
    return lines


def read_stream(path: Path) -> list[Line]:
    """Read a stream file.

    Raises:
        UserError: it cannot be read; see `parse_stream`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
        raise UserError(f"--descriptors {path}: cannot be read ({error}); name a text file") from None
    return parse_stream(text, str(path))


def lines_of(rows: Iterable[Mapping[str, object]]) -> list[Line]:
    """Lines made in a program, checked as those of a file are."""
    return [_line(number, row, f"descriptor {number}") for number, row in enumerate(rows, 1)]


def format_stream(lines: Sequence[Line]) -> str:
    """The lines as JSON Lines, enumerations by name; `parse_stream` reads the same back."""
    out = io.StringIO()
    for line in lines:
        named: dict[str, str | int | float] = {
            name: _ENUMS[name](value).name.lower() if name in _ENUMS and value in list(_ENUMS[name]) else value
            for name, value in line.values.items()
        }
        if "softmax_scale" in named:
            named["softmax_scale"] = softmax_scale_value(line.values["softmax_scale"])
        out.write(json.dumps(named) + "\n")
    return out.getvalue()


def _slot_log2(size: int) -> int:
    return min(max((size - 1).bit_length(), MIN_SLOT_LOG2), MAX_SLOT_LOG2)


def _complete(values: Mapping[str, int], config: NdpConfig) -> dict[str, int]:
    """Descriptor fields with their defaults, but for an address that is not given."""
    rows, columns = values["device_rows"], values["device_columns"]
    batch = values.get("gpu_rows", 1)
    packed, dtype = 0, values.get("dtype", DType.FP16)
    if rows and columns and values.get("transpose", 0):
        packed = pack_geometry_transposed(config, rows, columns, dtype).packed_bytes()
    elif rows and columns:
        packed = pack_geometry(config, rows, columns, dtype).packed_bytes
    field_limit = 1 << _WIDTHS["device_bytes"]
    defaults: dict[str, int] = {
        "type": Type.READ_COMPUTE,
        "op": Op.GEMV if batch == 1 else Op.GEMM,
        "gpu_rows": batch,
        "gpu_columns": columns,
        # Sizes that no field can state are left to the device to refuse.
        "device_bytes": packed % field_limit,
        "gpu_bytes": batch * values.get("gpu_columns", columns) * VALUE_BYTES % field_limit,
    }
    return defaults | {name: value for name, value in values.items() if name in _WIDTHS}


def default_scale(d: Descriptor) -> int:
    """The softmax scale of a line that states none: that of ordinary attention; 0 for other operations."""
    return ordinary_softmax_scale(d.device_columns) if d.op == Op.SOFTMAX and d.device_columns else 0


class _Allocator:
    def __init__(self, granule: int) -> None:
        self._granule = granule
        self.end = 0

    def take(self, size: int) -> int:
        start = self.end
        self.end += ceil_div(max(size, 1), self._granule) * self._granule
        return start


def place(config: NdpConfig, lines: Sequence[Line]) -> Stream:
    """Lay a stream out: rings of the queues used, then operands, from DPA 0 upwards, all in one window.

    A queue's slots are as large as its largest operand and result, its rings as deep as it has descriptors, at
    most `MAX_DEPTH`. A device operand without an address gets room of its own, shared by lines of the same shape
    and ``seed`` (by default the number of the line).

    Raises:
        UserError: a queue that the device has not, more than its memory, or an address within the rings.
    """
    slots: dict[int, int] = {}
    largest: dict[int, tuple[int, int]] = {}
    filled: list[tuple[Line, dict[str, int], int, int]] = []
    for line in lines:
        queue = line.values.get("queue", 0)
        if queue >= config.queues:
            raise UserError(
                f"descriptor of line {line.number}: queue is {queue}; {config.name!r} has 0 ... {config.queues - 1}"
            )
        values = _complete(line.values, config)
        slot = slots.get(queue, 0)
        slots[queue] = slot + 1
        submission, result = _slot_bytes(values, config)
        before = largest.get(queue, (0, 0))
        largest[queue] = max(before[0], submission), max(before[1], result)
        filled.append((line, values, queue, slot))

    allocator = _Allocator(config.stripe_bytes)
    places = {}
    for queue in sorted(slots):
        depth = min(max(slots[queue], MIN_DEPTH), MAX_DEPTH)
        submission_log2, result_log2 = (_slot_log2(size) for size in largest[queue])
        places[queue] = (
            depth,
            allocator.take(depth << submission_log2),
            submission_log2,
            allocator.take(depth << result_log2),
            result_log2,
        )
    rings_end = allocator.end
    operands: dict[tuple[int, ...], int] = {}
    entries = []
    for line, values, queue, slot in filled:
        seed = line.values.get("seed", line.number)
        if "device_address" not in values:
            shape = values["device_rows"], values["device_columns"], values.get("transpose", 0)
            key = *shape, expansion_log2(values.get("dtype", DType.FP16)), seed
            if key not in operands:
                operands[key] = allocator.take(values["device_bytes"])
            values["device_address"] = operands[key]
        elif values["device_address"] < rings_end:
            raise UserError(
                f"descriptor of line {line.number}: device_address {values['device_address']:#x} lies in the rings,"
                f" which end at {rings_end:#x}; choose a higher one, or none"
            )
        descriptor = Descriptor(**values)
        scale = line.values.get("softmax_scale", default_scale(descriptor))
        entries.append(Entry(line.number, descriptor, queue, slot, line.values.get("arrival_cycle", 0), seed, scale))
    memory_bytes = 1 << config.dpa_bits
    if allocator.end > memory_bytes:
        raise UserError(
            f"the stream's rings and operands take {allocator.end} bytes, {config.name!r} has {memory_bytes}: give"
            " fewer descriptors, or let some share an operand by giving them the same seed"
        )
    rings = {
        queue: RingSetup(
            base=0,
            limit=memory_bytes,
            depth=depth,
            submission_base=submission,
            submission_slot_log2=submission_log2,
            result_base=result,
            result_slot_log2=result_log2,
        )
        for queue, (depth, submission, submission_log2, result, result_log2) in places.items()
    }
    return Stream(config, tuple(entries), rings, memory_bytes)


def _slot_bytes(values: Mapping[str, int], config: NdpConfig) -> tuple[int, int]:
    """Bytes of the submission and of the result slot that a descriptor needs."""
    batch, columns, rows = values["gpu_rows"], values["gpu_columns"], values["device_rows"]
    submission = operand_offset(config)
    if values.get("source", Source.SLOT) == Source.SLOT:
        submission += batch * operand_row_stripes(config, columns) * config.stripe_bytes
    result = RESULT_OFFSET
    if not values.get("keep", Keep.NONE) and not values.get("acc_out", 0):
        result += batch * result_row_words(rows, transpose=values.get("transpose", 0)) * WORD_BYTES
    return submission, result
