"""Submission and completion rings in host-managed device memory.

A queue has a submission ring and a completion ring of the same depth; the descriptor in
submission slot i completes in result slot i. Both slots have a size that is a power of two.

Submission slot, from its start::

    line 0              descriptor in bytes 0 ... 25, valid word in bytes 60 ... 63
    operand_offset      GPU operand, row-major; row b starts at b * operand_row_stripes * stripe_bytes

The host writes the operand, fences, and only then writes line 0. The device reads line 0 in one
piece (a 64-byte line is read and written whole), and nothing else before it has seen the valid word.

Result slot, from its start::

    line 0              completion line, see `COMPLETION_FIELDS`; written last, after every result line is acknowledged
    RESULT_OFFSET       result, row-major; row b starts at b * result_row_words * 64, padded with zeros

A valid word carries a tag and the number of the ring's pass, which starts at the queue's ``PASS``
register and grows by one at each wrap. Old contents of memory (zeros, ones, a previous pass) are
therefore never taken for valid, and nothing has to be cleared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import DESCRIPTOR_BYTES, Descriptor
from plora.hw.defs.errors import UserError

LINE_BYTES = WORD_BYTES
"""Bytes that are read and written as one piece."""

VALID_OFFSET = 60
VALID_TAG = 0x5C
PASS_BITS = 24
MIN_DEPTH, MAX_DEPTH = 2, 4096
MIN_SLOT_LOG2, MAX_SLOT_LOG2 = 11, 24
"""Slot sizes from 2 KiB (line 0, padding and one stripe of operand at the full size) to 16 MiB."""

RESULT_OFFSET = LINE_BYTES


def operand_offset(config: NdpConfig) -> int:
    """Byte offset of the GPU operand in its submission slot: the first stripe after line 0."""
    return config.stripe_bytes


def valid_word(pass_number: int) -> int:
    """The 32-bit valid word of ring pass ``pass_number`` (taken modulo 2**24)."""
    return VALID_TAG << PASS_BITS | pass_number % (1 << PASS_BITS)


def submission_line(descriptor: Descriptor, pass_number: int) -> bytes:
    """The 64 bytes of line 0 of a submission slot."""
    body = descriptor.pack().ljust(VALID_OFFSET, b"\0")
    return body + valid_word(pass_number).to_bytes(4, "little")


class LineField(NamedTuple):
    """A field of a 64-byte line: ``size`` bytes from byte ``offset``, little-endian."""

    name: str
    offset: int
    size: int
    doc: str


COMPLETION_FIELDS: tuple[LineField, ...] = (
    LineField("status", 0, 1, "status code"),
    LineField("numeric", 1, 1, "numeric flags: bit 0 a result is NaN, bit 1 a result overflowed to infinity"),
    LineField("result_bytes", 4, 4, "bytes of the result as stored, row padding included; 0 if none was written"),
    LineField("cycles", 8, 4, "core cycles from the descriptor's first DRAM beat to its last"),
    LineField("descriptor", 16, DESCRIPTOR_BYTES, "the descriptor as it was read"),
    LineField("valid", VALID_OFFSET, 4, "valid word of this ring pass"),
)

NUMERIC_NAN = 1
NUMERIC_OVERFLOW = 2


@dataclass(frozen=True)
class Completion:
    """A decoded completion line."""

    status: int
    numeric: int
    result_bytes: int
    cycles: int
    descriptor: Descriptor
    valid: int

    @classmethod
    def unpack(cls, line: bytes) -> Completion:
        """Decode a 64-byte completion line.

        Raises:
            UserError: ``line`` is not 64 bytes long.
        """
        if len(line) != LINE_BYTES:
            raise UserError(f"a completion line has {LINE_BYTES} bytes, not {len(line)}")
        raw = {f.name: line[f.offset : f.offset + f.size] for f in COMPLETION_FIELDS}
        numbers = {name: int.from_bytes(data, "little") for name, data in raw.items() if name != "descriptor"}
        return cls(**numbers, descriptor=Descriptor.unpack(raw["descriptor"]))

    def pack(self) -> bytes:
        """Encode the completion line (the inverse of `unpack`)."""
        line = bytearray(LINE_BYTES)
        for field in COMPLETION_FIELDS:
            value = getattr(self, field.name)
            data = value.pack() if isinstance(value, Descriptor) else int(value).to_bytes(field.size, "little")
            line[field.offset : field.offset + field.size] = data
        return bytes(line)
