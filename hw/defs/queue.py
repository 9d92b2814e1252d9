"""Submission and completion rings in host-managed device memory.

A queue has a submission ring and a completion ring of the same depth; the descriptor in
submission slot i completes in result slot i. Both slots have a size that is a power of two.

Submission slot, from its start::

    line 0              descriptor and what it does not hold, see `SUBMISSION_FIELDS`
    operand_offset      GPU operand, row-major; row b starts at b * operand_row_stripes * stripe_bytes

The host writes the operand, fences, and only then writes line 0. The device reads line 0 in one
piece (a 64-byte line is read and written whole), and nothing else before it has seen the valid word.

Result slot, from its start::

    line 0              completion line, see `COMPLETION_FIELDS`; written last, after every result line is acknowledged
    RESULT_OFFSET       result, row-major; row b starts at b * result_row_words * 64, padded with zeros;
                        the last word of a row of a transposed descriptor is its anchor, see `ANCHOR_FIELDS`

A valid word carries a tag and the number of the ring's pass, which starts at the queue's ``PASS``
register and grows by one at each wrap. Old contents of memory (zeros, ones, a previous pass) are
therefore never taken for valid, and nothing has to be cleared.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import DESCRIPTOR_BYTES, Descriptor
from plora.hw.defs.errors import UserError

LINE_BYTES = WORD_BYTES
"""Bytes that are read and written as one piece."""

SOFTMAX_SCALE_OFFSET = 32
EXPONENTS_OFFSET = 36
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


class LineField(NamedTuple):
    """A field of a 64-byte line: ``size`` bytes from byte ``offset``, little-endian."""

    name: str
    offset: int
    size: int
    doc: str


SUBMISSION_FIELDS: tuple[LineField, ...] = (
    LineField("descriptor", 0, DESCRIPTOR_BYTES, "the descriptor"),
    LineField(
        "softmax_scale",
        SOFTMAX_SCALE_OFFSET,
        4,
        "FP32 factor of the scores, to which 2 is then raised; its low 7 bits are ignored; read for op SOFTMAX only",
    ),
    LineField(
        "operand_exponent",
        EXPONENTS_OFFSET,
        1,
        "signed, read for BF16 only, as are the next two: a GPU operand from the slot is multiplied by 2 to this, and"
        " the sums divided by it, whatever their source",
    ),
    LineField("device_exponent", EXPONENTS_OFFSET + 1, 1, "signed: the same of the device operand"),
    LineField(
        "kept_exponent",
        EXPONENTS_OFFSET + 2,
        1,
        "signed: a result that stays on the device is multiplied by 2 to this, once it is BF16",
    ),
    LineField("valid", VALID_OFFSET, 4, "valid word of this ring pass; written last"),
)

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

ANCHOR_FIELDS: tuple[LineField, ...] = (
    LineField("anchor", 0, 4, "M, signed; -2^31: none, every score was minus infinity"),
    LineField("shift", 4, 1, "e: the row was divided by 2^e"),
    LineField("flags", 5, 1, "bit 0: a softmax term of the row is NaN"),
    LineField("sum", 8, 8, "l, the sum of the terms in units of 2^-24"),
)

ANCHOR_NONE = -(1 << 31)
ANCHOR_NAN = 1
SUM_FRACTION_BITS = 24
"""The sum of softmax terms counts units of ``2**-SUM_FRACTION_BITS``, the last bit of an FP16 subnormal."""

SCALE_FRACTION_BITS = 16
"""Fraction bits of the softmax scale that the device uses."""
_FP32_FRACTION_BITS, _FP32_BIAS = 23, 127
SCALE_MIN_EXPONENT, SCALE_MAX_EXPONENT = -24, 7


MIN_OPERAND_EXPONENT, MAX_OPERAND_EXPONENT = -128, 39
"""Exponents that a BF16 descriptor may state. With the largest for both operands and for the softmax's shift, one
step of the sums is still a normal BF16 value, so that no result is ever subnormal."""


class Exponents(NamedTuple):
    """Powers of two that bring BF16 operands into the range of FP16, see `SUBMISSION_FIELDS`."""

    operand: int = 0
    device: int = 0
    kept: int = 0

    def allowed(self) -> bool:
        """True if a BF16 descriptor may state them."""
        return all(MIN_OPERAND_EXPONENT <= exponent <= MAX_OPERAND_EXPONENT for exponent in self)


NO_EXPONENTS = Exponents()


def submission_line(
    descriptor: Descriptor, pass_number: int, softmax_scale: int = 0, exponents: Exponents = NO_EXPONENTS
) -> bytes:
    """The 64 bytes of line 0 of a submission slot; ``softmax_scale`` as FP32 bits.

    Raises:
        UserError: a value does not fit its field.
    """
    if not 0 <= softmax_scale < 1 << 32:
        raise UserError(f"softmax scale {softmax_scale:#x}: give the bits of an FP32 number")
    for name, exponent in exponents._asdict().items():
        if not -128 <= exponent <= 127:
            raise UserError(f"the {name} exponent is {exponent}: it has 8 bits, -128 ... 127")
    values = {
        "descriptor": descriptor.pack(),
        "softmax_scale": softmax_scale.to_bytes(4, "little"),
        "operand_exponent": exponents.operand.to_bytes(1, "little", signed=True),
        "device_exponent": exponents.device.to_bytes(1, "little", signed=True),
        "kept_exponent": exponents.kept.to_bytes(1, "little", signed=True),
        "valid": valid_word(pass_number).to_bytes(4, "little"),
    }
    line = bytearray(LINE_BYTES)
    for field in SUBMISSION_FIELDS:
        line[field.offset : field.offset + field.size] = values[field.name]
    return bytes(line)


def exponents_of(line: bytes) -> Exponents:
    """The exponents in line 0 of a submission slot."""
    return Exponents(*(int.from_bytes(line[EXPONENTS_OFFSET + i :][:1], "little", signed=True) for i in range(3)))


def softmax_scale_of(line: bytes) -> int:
    """The FP32 bits of the softmax scale in line 0 of a submission slot."""
    return int.from_bytes(line[SOFTMAX_SCALE_OFFSET : SOFTMAX_SCALE_OFFSET + 4], "little")


def softmax_scale(factor: float) -> int:
    """Return the FP32 bits of the softmax scale nearest to ``factor`` that the device uses in full.

    The device multiplies scores with it and raises 2 to the product: ``log2(e) / sqrt(head_dim)`` makes
    the ordinary softmax. Of its fraction the device uses `SCALE_FRACTION_BITS` bits and ignores the rest.

    Raises:
        UserError: the scale is no number of at least 2**-24 and below 2**8.
    """
    if not 2.0**SCALE_MIN_EXPONENT <= factor < 2.0 ** (SCALE_MAX_EXPONENT + 1):  # false of NaN
        raise UserError(
            f"softmax scale {factor}: choose 2**{SCALE_MIN_EXPONENT} or more, and less than 2**{SCALE_MAX_EXPONENT + 1}"
        )
    fraction, exponent = math.frexp(factor)  # fraction in [0.5, 1)
    # With the hidden bit, which counts as one step of the exponent, and so does a carry out of the rounding.
    mantissa = round(math.ldexp(fraction, SCALE_FRACTION_BITS + 1))
    bits = (exponent - 2 + _FP32_BIAS << SCALE_FRACTION_BITS) + mantissa
    largest = (SCALE_MAX_EXPONENT + 1 + _FP32_BIAS << SCALE_FRACTION_BITS) - 1
    return min(bits, largest) << _FP32_FRACTION_BITS - SCALE_FRACTION_BITS


def ordinary_softmax_scale(head_dim: int) -> int:
    """The softmax scale of ordinary attention, log2(e) / sqrt(head_dim)."""
    return softmax_scale(math.log2(math.e) / math.sqrt(head_dim))


def softmax_scale_value(scale: int) -> float:
    """The number that FP32 bits mean."""
    return float(struct.unpack("<f", scale.to_bytes(4, "little"))[0])


def softmax_scale_allowed(scale: int) -> bool:
    """True if the FP32 bits ``scale`` are a positive number from 2**-24 to below 2**8."""
    exponent = (scale >> _FP32_FRACTION_BITS) - _FP32_BIAS  # with the sign on top: beyond the largest if negative
    return SCALE_MIN_EXPONENT <= exponent <= SCALE_MAX_EXPONENT


@dataclass(frozen=True)
class Anchor:
    """The last word of a result row of a transposed descriptor.

    The row's values are ``sum(2**(t - M - e) * v)`` over the tokens, t their scaled scores.
    """

    anchor: int
    """M, or `ANCHOR_NONE`."""
    shift: int
    """e."""
    flags: int
    sum: int
    """l, in units of ``2**-SUM_FRACTION_BITS``: ``sum(2**(t - M))``."""

    @classmethod
    def unpack(cls, word: bytes) -> Anchor:
        """Decode the word.

        Raises:
            UserError: ``word`` has not the length of a line.
        """
        if len(word) != LINE_BYTES:
            raise UserError(f"an anchor is a word of {LINE_BYTES} bytes, not {len(word)}")
        return cls(
            **{
                f.name: int.from_bytes(word[f.offset : f.offset + f.size], "little", signed=f.name == "anchor")
                for f in ANCHOR_FIELDS
            }
        )

    def pack(self) -> bytes:
        """Encode the word (the inverse of `unpack`)."""
        word = bytearray(LINE_BYTES)
        for f in ANCHOR_FIELDS:
            value = int(getattr(self, f.name)).to_bytes(f.size, "little", signed=f.name == "anchor")
            word[f.offset : f.offset + f.size] = value
        return bytes(word)


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
