"""The read-compute descriptor: 204 bits, exactly the fields of Fig. 4 of the paper.

``FIELDS`` is the only place that states the layout. The Amaranth layout, the C header and the
documentation table are made from it.

The two operands, in the terms of y = x W^T:

* the *device operand* W, ``device_rows`` x ``device_columns`` = N x K, resides in device memory at
  ``device_address`` in the packed layout of `plora.hw.defs.packing`;
* the *GPU operand* x, ``gpu_rows`` x ``gpu_columns`` = B x K, row-major, comes with the descriptor in
  its submission slot, or is an intermediate that an earlier descriptor of the same chain kept.

Attention of one head over T tokens of D values is a chain of two kinds of descriptors. ``SOFTMAX``:
W is K (N = T, K = D), x the queries, and the kept intermediate p = 2**(scale * x W^T - anchor). Then,
with ``transpose``: W is V^T (N = D, K = T), x the kept p, and y = p V with its anchors. A chain may hold several heads
and begin the next head's scores before it comes to the values of this one, whose p are then the previous ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from plora.hw.defs.errors import UserError


class Type(IntEnum):
    """What kind of request. Loads and stores never come as descriptors: the paper names them, so they have codes."""

    NONE = 0
    LOAD = 1
    STORE = 2
    READ_COMPUTE = 3


class Op(IntEnum):
    """Operation. ``GEMV`` is ``GEMM`` with exactly one GPU row; ``SOFTMAX`` a GEMM whose results are softmax terms."""

    NONE = 0
    GEMV = 1
    GEMM = 2
    SOFTMAX = 3


class DType(IntEnum):
    """Data type of both operands and of the result.

    Of the integers (`plora.hw.defs.integers`) it is that of the device operand, keys or values of attention; the
    GPU operand and the result are FP16 then.
    """

    FP16 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


class Source(IntEnum):
    """Where the GPU operand comes from."""

    SLOT = 0
    """The descriptor's own submission slot."""
    KEPT = 1
    """The intermediate that this chain kept."""
    CHAIN = 2
    """The operand that this chain loaded last from a slot (x for the next matrix that shares it)."""
    PREVIOUS = 3
    """The softmax terms that this chain kept before those of its newest SOFTMAX descriptor with `Keep.NEW`."""


class Keep(IntEnum):
    """What becomes of the result."""

    NONE = 0
    """Written to the result slot."""
    NEW = 1
    """Stays on the device as the chain's intermediate, replacing what was kept."""
    APPEND = 2
    """Stays on the device as further columns of the intermediate; needs a multiple of 32 columns before it."""


class Field(NamedTuple):
    """One field of the descriptor: bits ``[offset, offset + width)`` of the little-endian bit string."""

    name: str
    offset: int
    width: int
    doc: str


def _fields(*specs: tuple[str, int, str]) -> tuple[Field, ...]:
    placed, offset = [], 0
    for name, width, doc in specs:
        placed.append(Field(name, offset, width, doc))
        offset += width
    return tuple(placed)


FIELDS: tuple[Field, ...] = _fields(
    ("type", 2, "request type; a descriptor is always read-compute"),
    ("op", 3, "operation"),
    ("dtype", 3, "data type"),
    ("chain", 1, "1: the next descriptor of this queue belongs to the same chain"),
    ("source", 2, "where the GPU operand comes from"),
    ("keep", 2, "what becomes of the result"),
    ("acc_in", 1, "1: go on with the sums that the previous descriptor of the chain left in the accumulators"),
    ("acc_out", 1, "1: leave the sums in the accumulators for the next descriptor of the chain; no result"),
    ("transpose", 1, "1: the device operand lies column by column (V), and the kept softmax terms are weighed by it"),
    ("reserved", 4, "must be zero"),
    ("device_address", 64, "DPA of the device operand in bytes, a multiple of the stripe size"),
    ("device_bytes", 20, "bytes of the device operand as packed"),
    ("device_rows", 20, "N, rows of the device operand"),
    ("device_columns", 20, "K, columns of the device operand"),
    ("gpu_bytes", 20, "bytes of the GPU operand, B x K values without padding"),
    ("gpu_rows", 20, "B, rows of the GPU operand"),
    ("gpu_columns", 20, "columns of the GPU operand, equal to K"),
)

HEADER_BITS = 20
"""Type, OP, data type and flags: what the paper packs into its first field."""

DESCRIPTOR_BITS = sum(field.width for field in FIELDS)
DESCRIPTOR_BYTES = (DESCRIPTOR_BITS + 7) // 8
MAX_OPERAND_BYTES = (1 << 20) - 1
"""Largest operand that the 20-bit byte size can state."""

_BY_NAME = {field.name: field for field in FIELDS}


@dataclass(frozen=True)
class Descriptor:
    """The fields of `FIELDS` as plain integers; enumerations may be given for coded fields.

    Any value that fits its field is representable, legal or not: judging is the decoder's work.
    """

    type: int = Type.READ_COMPUTE
    op: int = Op.GEMM
    dtype: int = DType.FP16
    chain: int = 0
    source: int = Source.SLOT
    keep: int = Keep.NONE
    acc_in: int = 0
    acc_out: int = 0
    transpose: int = 0
    reserved: int = 0
    device_address: int = 0
    device_bytes: int = 0
    device_rows: int = 0
    device_columns: int = 0
    gpu_bytes: int = 0
    gpu_rows: int = 0
    gpu_columns: int = 0

    def pack(self) -> bytes:
        """Return the `DESCRIPTOR_BYTES` bytes, little-endian, unused top bits zero.

        Raises:
            UserError: a value does not fit its field.
        """
        bits = 0
        for field in FIELDS:
            value = int(getattr(self, field.name))
            if not 0 <= value < 1 << field.width:
                raise UserError(
                    f"descriptor field {field.name} is {value}: it has {field.width} bits,"
                    f" 0 ... {(1 << field.width) - 1}"
                )
            bits |= value << field.offset
        return bits.to_bytes(DESCRIPTOR_BYTES, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Descriptor:
        """Return the descriptor in the first `DESCRIPTOR_BYTES` bytes of ``data``.

        Raises:
            UserError: ``data`` is shorter than that.
        """
        if len(data) < DESCRIPTOR_BYTES:
            raise UserError(f"a descriptor has {DESCRIPTOR_BYTES} bytes, not {len(data)}")
        bits = int.from_bytes(data[:DESCRIPTOR_BYTES], "little")
        return cls(**{f.name: bits >> f.offset & (1 << f.width) - 1 for f in FIELDS})

    def describe(self) -> str:
        """One line for a person: the operation, its shape and its flags by name."""
        enums: dict[str, type[IntEnum]] = {"type": Type, "op": Op, "dtype": DType, "source": Source, "keep": Keep}

        def named(field: str) -> str:
            value = int(getattr(self, field))
            try:
                return enums[field](value).name.lower()
            except ValueError:
                return f"{field}={value}?"

        flags = [name for name in ("chain", "acc_in", "acc_out", "transpose") if getattr(self, name)]
        return (
            f"{named('type')} {named('op')} {named('dtype')} x[{self.gpu_rows}x{self.gpu_columns}]"
            f" ({self.gpu_bytes} B, {named('source')}) W[{self.device_rows}x{self.device_columns}]"
            f" ({self.device_bytes} B at {self.device_address:#x}) keep={named('keep')}"
            + (f" {' '.join(flags)}" if flags else "")
        )


def field(name: str) -> Field:
    """Return the field called ``name`` (KeyError if there is none)."""
    return _BY_NAME[name]
