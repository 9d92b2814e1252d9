"""Readers of public request traces.

A format is recognised by its header or keys:

- Vidur CSV: ``arrived_at,num_prefill_tokens,num_decode_tokens[,lora_id]``, seconds;
- Azure CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``, dates;
- LMSYS/VTC CSV: ``req_id,arrival_s,adapter,prompt_tokens,output_tokens``;
- BurstGPT CSV: ``Timestamp,...,Request tokens,Response tokens,...``, seconds;
- Mooncake JSONL: ``timestamp`` in milliseconds, ``input_length``, ``output_length``, ``hash_ids``;
- recorded-run JSONL: ``input_toks``, ``output_toks`` and ``arrival_time_ns`` or ``arrival_time`` (s).

Of the public traces only LMSYS/VTC says which adapter a request wants. For any other, adapters come
from a popularity law that the caller gives, and the metadata says so.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.workload.popularity import IntArray, Popularity
from plora.sim.workload.requests import NO_ADAPTER, Requests, stream

MOONCAKE_BLOCK_TOKENS = 512
_TOKEN_LIMIT = (1 << 31) - 1


@dataclass
class _Columns:
    """What a reader collects: arrivals in seconds, token counts, and what some traces also have."""

    arrival: list[float]
    inputs: list[int]
    outputs: list[int]
    adapters: list[str]
    blocks: list[list[int]]


class _BadRow(Exception):
    """A row that cannot be used, and how to mend it."""


def _tokens(text: object, column: str, minimum: int) -> int:
    try:
        value = int(str(text))  # a float or a boolean has no such text
    except ValueError:
        raise _BadRow(f"{column} is {text!r}; give a whole number of tokens") from None
    if not minimum <= value <= _TOKEN_LIMIT:
        raise _BadRow(f"{column} is {value}; give {minimum} to {_TOKEN_LIMIT} tokens")
    return value


def _seconds(text: object, column: str) -> float:
    try:
        value = float(str(text))
    except ValueError:
        raise _BadRow(f"{column} is {text!r}; give a number") from None
    if not math.isfinite(value):
        raise _BadRow(f"{column} is {text!r}; give a finite number")
    return value


def _text(value: object, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _BadRow(f"{column} is {value!r}; give a string")
    return str(value).strip()


def _date_seconds(text: object, column: str) -> float:
    # fromisoformat takes at most six digits of a second before Python 3.11's relaxed parser; Azure writes seven
    whole, _, fraction = _text(text, column).partition(".")
    try:
        moment = datetime.fromisoformat(whole)
        extra = float(f"0.{fraction.split('+')[0]}") if fraction else 0.0
    except ValueError:
        raise _BadRow(f"{column} is {text!r}; give a date like 2023-11-16 18:17:03.97") from None
    return (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds() + extra


RowReader = Callable[[dict[str, Any], _Columns], None]


def _vidur(row: dict[str, Any], columns: _Columns) -> None:
    columns.arrival.append(_seconds(row["arrived_at"], "arrived_at"))
    columns.inputs.append(_tokens(row["num_prefill_tokens"], "num_prefill_tokens", 1))
    columns.outputs.append(_tokens(row["num_decode_tokens"], "num_decode_tokens", 1))
    if "lora_id" in row:
        columns.adapters.append(_text(row["lora_id"], "lora_id"))


def _azure(row: dict[str, Any], columns: _Columns) -> None:
    columns.arrival.append(_date_seconds(row["TIMESTAMP"], "TIMESTAMP"))
    columns.inputs.append(_tokens(row["ContextTokens"], "ContextTokens", 1))
    columns.outputs.append(_tokens(row["GeneratedTokens"], "GeneratedTokens", 1))


def _lmsys_vtc(row: dict[str, Any], columns: _Columns) -> None:
    columns.arrival.append(_seconds(row["arrival_s"], "arrival_s"))
    columns.inputs.append(_tokens(row["prompt_tokens"], "prompt_tokens", 1))
    columns.outputs.append(_tokens(row["output_tokens"], "output_tokens", 1))
    columns.adapters.append(_text(row["adapter"], "adapter"))


def _burstgpt(row: dict[str, Any], columns: _Columns) -> None:
    inputs = _tokens(row["Request tokens"], "Request tokens", 1)
    outputs = _tokens(row["Response tokens"], "Response tokens", 0)
    if outputs == 0:
        return  # a failed call: BurstGPT records 0 response tokens
    columns.arrival.append(_seconds(row["Timestamp"], "Timestamp"))
    columns.inputs.append(inputs)
    columns.outputs.append(outputs)


def _mooncake(row: dict[str, Any], columns: _Columns) -> None:
    columns.arrival.append(_seconds(row["timestamp"], "timestamp") * 1e-3)
    columns.inputs.append(_tokens(row["input_length"], "input_length", 1))
    columns.outputs.append(_tokens(row["output_length"], "output_length", 1))
    blocks = row.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(b, int) and 0 <= b <= _TOKEN_LIMIT for b in blocks):
        raise _BadRow("hash_ids must be a list of whole numbers")
    columns.blocks.append(blocks)


def _recorded(row: dict[str, Any], columns: _Columns) -> None:
    if "arrival_time_ns" in row:
        columns.arrival.append(_seconds(row["arrival_time_ns"], "arrival_time_ns") * 1e-9)
    else:
        columns.arrival.append(_seconds(row["arrival_time"], "arrival_time"))
    columns.inputs.append(_tokens(row["input_toks"], "input_toks", 1))
    columns.outputs.append(_tokens(row["output_toks"], "output_toks", 1))


_FORMATS: tuple[tuple[str, frozenset[str], RowReader], ...] = (
    ("vidur", frozenset({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}), _vidur),
    ("azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    ("lmsys-vtc", frozenset({"arrival_s", "adapter", "prompt_tokens", "output_tokens"}), _lmsys_vtc),
    ("burstgpt", frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burstgpt),
    ("mooncake", frozenset({"timestamp", "input_length", "output_length"}), _mooncake),
    ("recorded", frozenset({"input_toks", "output_toks", "arrival_time_ns"}), _recorded),
    ("recorded", frozenset({"input_toks", "output_toks", "arrival_time"}), _recorded),
)


def _recognise(keys: Iterable[str], path: Path) -> tuple[str, RowReader]:
    present = set(keys)
    for name, needed, reader in _FORMATS:
        if needed <= present:
            return name, reader
    shown = ", ".join(sorted(present)[:8])
    raise UserError(
        f"{path}:1: no known trace format has the columns {shown}; "
        "give arrived_at,num_prefill_tokens,num_decode_tokens[,lora_id]"
    )


def _csv_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    table = csv.DictReader(lines, skipinitialspace=True)
    header = table.fieldnames or []
    for row in table:
        if None in row or None in row.values():
            raise UserError(f"{path}:{table.line_num}: has not the {len(header)} columns of the header; mend that line")
        yield table.line_num, row


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error}); mend that line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: holds a {type(row).__name__}; give one JSON object a line")
        yield number, row


def _collect(path: Path) -> tuple[str, _Columns]:
    columns = _Columns([], [], [], [], [])
    name, reader = "", None
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            first = handle.read(1)
            handle.seek(0)
            rows = _json_rows(handle, path) if first in ("{", "[") else _csv_rows(handle, path)
            for number, row in rows:
                if reader is None:
                    name, reader = _recognise(row, path)
                try:
                    reader(row, columns)
                except _BadRow as error:
                    raise UserError(f"{path}:{number}: {error}") from None
                except KeyError as error:
                    raise UserError(
                        f"{path}:{number}: {error.args[0]} is missing; give it as in the first line"
                    ) from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a text file in a known trace format") from None
    if not columns.arrival:
        raise UserError(f"{path}: holds no requests; give at least one row after the header")
    return name, columns


def _identities(names: list[str]) -> tuple[IntArray, int]:
    """Index of each adapter name by popularity, the most frequent 0; no name means the base model."""
    counts: dict[str, int] = {}
    for name in names:
        if name not in ("", "-1"):
            counts[name] = counts.get(name, 0) + 1
    order = {name: index for index, name in enumerate(sorted(counts, key=lambda n: (-counts[n], n)))}
    return np.array([order.get(name, NO_ADAPTER) for name in names], dtype=np.int32), len(order)


def read_trace(path: Path | str, *, popularity: Popularity | None = None, seed: int = 0) -> Requests:
    """Read a trace, sorted by arrival and starting at 0 s.

    Adapters are the trace's own where it has them; else they are drawn from `popularity`, or all
    requests go to the base model without one. ``metadata["adapters"]`` says which. Raises
    :class:`UserError` naming file and line for a malformed row, and if `popularity` is given for a
    trace with identities of its own.
    """
    path = Path(path)
    name, columns = _collect(path)
    count = len(columns.arrival)
    arrival = np.array(columns.arrival)
    order = np.argsort(arrival, kind="stable")
    arrival = arrival[order] - arrival.min()
    if columns.adapters:
        if popularity is not None:
            raise UserError(f"{path}: has adapter identities of its own; leave the popularity law out")
        adapter, adapters = _identities(columns.adapters)
        adapter, origin = adapter[order], f"trace: identities of {path.name}"
    elif popularity is not None:
        adapter, adapters = popularity.draw(stream(seed, "adapters"), count), popularity.adapters
        origin = f"law: {popularity.describe()}, seed {seed} ({path.name} has no adapter identities)"
    else:
        adapter, adapters = np.full(count, NO_ADAPTER, dtype=np.int32), 0
        origin = f"none: base model only ({path.name} has no adapter identities)"
    blocks, offsets = _blocks(columns.blocks, order)
    return Requests(
        arrival_s=arrival,
        input_tokens=np.array(columns.inputs, dtype=np.int32)[order],
        output_tokens=np.array(columns.outputs, dtype=np.int32)[order],
        adapter=adapter,
        adapters=adapters,
        metadata={
            "arrivals": f"trace: {path.name} ({name}), {count} requests",
            "lengths": f"trace: {path.name}",
            "adapters": origin,
        },
        prefix_blocks=blocks,
        prefix_offsets=offsets,
        prefix_block_tokens=MOONCAKE_BLOCK_TOKENS if blocks is not None else 0,
    )


def _blocks(lists: list[list[int]], order: Any) -> tuple[IntArray | None, IntArray | None]:
    """Prefix hashes of all requests one after another, and where each request's begin."""
    if not lists:
        return None, None
    arranged = [lists[index] for index in order.tolist()]
    offsets = np.zeros(len(arranged) + 1, dtype=np.int32)
    np.cumsum([len(entry) for entry in arranged], out=offsets[1:])
    return np.array([block for entry in arranged for block in entry], dtype=np.int32), offsets
