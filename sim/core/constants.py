"""Counts that the RTL's structure fixes, with the place in the RTL that each is read from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Fact, convert, read_toml

_FILE = Path(__file__).parent / "data" / "core.toml"


class CoreConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cycles from one registered event to the next, and numbers of entries; ``data/core.toml`` says what each is."""

    instruction_buffer: int
    decode: int
    job_slots: int
    records: int
    finished: int
    burst_cut: int
    burst_skip: int
    burst_request: int
    request_queue: int
    bursts_in_flight: int
    page_words: int
    burst_share: int
    rendezvous: int
    grant: int
    array: int
    collect: int
    softmax: int
    softmax_settle: int
    softmax_stored: int
    p_scaler: int
    queue: int
    retire: int
    write_start: int
    line_queue: int
    write_end: int
    read_return: int
    write_return: int
    engine_job: int
    slot_arrived: int
    slot_reads: int
    completion_writes: int
    acknowledged: int
    backoff_log2: int
    host_lines: int
    host_request: int
    host_return: int
    register_read: int
    command: int
    command_write: int
    doorbell: int
    register_write: int


def constant_facts(path: Path = _FILE) -> dict[str, Fact]:
    """Every constant with its origin.

    Raises:
        UserError: the file has another table than ``[constants]``, or something that is no `Fact`.
    """
    tables = convert(read_toml(path), dict[str, dict[str, Fact]], path.name)
    if set(tables) != {"constants"}:
        raise UserError(f"{path.name}: tables {', '.join(tables)}; give [constants] alone")
    return tables["constants"]


@cache
def load_constants(path: Path = _FILE) -> CoreConstants:
    """The constants as integers.

    Raises:
        UserError: one is missing, unknown, negative or no integer.
    """
    values = {}
    for name, fact in constant_facts(path).items():
        if fact.value < 0 or fact.value != int(fact.value):
            raise UserError(f"{path.name}: {name} is {fact.value:g}; give a whole number of cycles")
        values[name] = int(fact.value)
    return convert(values, CoreConstants, f"{path.name}: [constants]")
