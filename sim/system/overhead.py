"""What a descriptor costs beside its work, as measured on the RTL: the figures behind the costs of the presets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

_FILE = Path(__file__).parent / "data" / "overhead.json"


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Core cycles of one descriptor on an idle device; see `plora.sw.overhead_run.Times`."""

    doorbell_to_first_word: int
    first_to_last_word: int
    last_word_to_completion: int
    result_to_completion: int


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shape: N, K, B, its times, and the bytes that it moved over the link, by purpose."""

    device_rows: int
    device_columns: int
    gpu_rows: int
    times: Times
    read_latencies_before: float
    write_latencies_after: float
    link_bytes: dict[str, float]
    link_bytes_interrupt: dict[str, float]


class Measured(msgspec.Struct, frozen=True):
    """The output of ``plora rtl overhead --preset small --json``."""

    preset: str
    read_latency_cycles: int
    """Latency of the memory in the measurement."""
    write_latency_cycles: int
    descriptors: list[Descriptor]


@cache
def measured_overhead() -> Measured:
    """Return the committed measurement."""
    return msgspec.json.decode(_FILE.read_bytes(), type=Measured)
