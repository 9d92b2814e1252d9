"""Status codes: what the device says of a descriptor in its completion slot."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Result of one descriptor. Everything but ``OK`` means that no result was written.

    A descriptor with several faults gets the first in the order of `CHECK_ORDER`.
    """

    OK = 0
    BAD_TYPE = 1
    BAD_OP = 2
    BAD_DTYPE = 3
    BAD_FLAGS = 4
    BAD_RESERVED = 5
    ZERO_DIMENSION = 6
    SHAPE_MISMATCH = 7
    SIZE_MISMATCH = 8
    MISALIGNED = 9
    OUT_OF_WINDOW = 10
    INPUT_TOO_LARGE = 11
    OUTPUT_TOO_LARGE = 12
    WEIGHTS_TOO_LARGE = 13
    SLOT_OVERFLOW = 14
    CHAIN_BROKEN = 15
    CHAIN_ABORTED = 16
    MEMORY_ERROR = 17
    ABORTED = 18
    BAD_SCALE = 19


CHECK_ORDER: tuple[Status, ...] = (
    *(status for status in Status if Status.OK < status <= Status.SLOT_OVERFLOW),
    Status.BAD_SCALE,
    Status.CHAIN_BROKEN,
)
"""What the decoder finds out of a descriptor, in the order of its checks."""

MEANING: dict[Status, str] = {
    Status.OK: "done; the result is in the result slot",
    Status.BAD_TYPE: "type is not read-compute: loads and stores are ordinary memory accesses, not descriptors",
    Status.BAD_OP: "op is not an operation of this device",
    Status.BAD_DTYPE: "data type is not supported for this operation",
    Status.BAD_FLAGS: "flags contradict each other or the operation",
    Status.BAD_RESERVED: "a reserved bit is set",
    Status.ZERO_DIMENSION: "a dimension is zero",
    Status.SHAPE_MISMATCH: "the inner dimensions differ, or K or the batch is not what the operation allows",
    Status.SIZE_MISMATCH: "a byte size does not follow from the dimensions",
    Status.MISALIGNED: "the device operand does not start at a multiple of the stripe size",
    Status.OUT_OF_WINDOW: "an address lies outside the queue's base and limit, or outside memory",
    Status.INPUT_TOO_LARGE: "the GPU operand does not fit the input buffer",
    Status.OUTPUT_TOO_LARGE: "the result does not fit the output buffer",
    Status.WEIGHTS_TOO_LARGE: "one row group does not fit the DRAM buffer, as more than two input rows need",
    Status.SLOT_OVERFLOW: "the operand or the result does not fit its slot",
    Status.CHAIN_BROKEN: "the next descriptor of a chain did not arrive in time, or does not fit its predecessor",
    Status.CHAIN_ABORTED: "an earlier descriptor of the same chain failed",
    Status.MEMORY_ERROR: "memory answered with an error or poison, or not at all",
    Status.ABORTED: "the queue was reset or disabled while the descriptor was under way",
    Status.BAD_SCALE: "the softmax scale is not at least 2^-24 and below 2^8, or an exponent of BF16 is above 39",
}
"""One sentence a status, for messages and the documentation table."""
