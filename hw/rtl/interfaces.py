"""Records that travel between the blocks of the device, made from the shared definitions.

Addresses inside the device are DPA in *words* of 64 bytes unless a name says bytes.
"""

from __future__ import annotations

from amaranth.hdl import signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import FIELDS
from plora.hw.defs.queue import Exponents

WORD_BITS = 8 * WORD_BYTES
STATUS_BITS = 8
NUMERIC_BITS = 2
QUEUE_BITS = 6
SCALE_BITS = 32
OPERAND_EXPONENT_BITS = 8

descriptor_layout = data.StructLayout({field.name: unsigned(field.width) for field in FIELDS})
"""The 204-bit descriptor, bit for bit as in memory."""


exponents_layout = data.StructLayout({name: signed(OPERAND_EXPONENT_BITS) for name in Exponents._fields})
"""The powers of two of a BF16 descriptor, byte for byte as in the submission line."""


def word_address_bits(config: NdpConfig) -> int:
    """Bits of a DPA counted in words."""
    return config.dpa_bits - (WORD_BYTES.bit_length() - 1)


def fetched_layout(config: NdpConfig) -> data.StructLayout:
    """A descriptor as the queue engine hands it to the core, with what its queue allows."""
    return data.StructLayout(
        {
            "descriptor": descriptor_layout,
            # The softmax scale that came with it, FP32.
            "scale": SCALE_BITS,
            "exponents": exponents_layout,
            "queue": QUEUE_BITS,
            # First of a chain (or no chain at all): the decoder forgets the chain before it.
            "first": 1,
            # Not to be executed, for this reason, decided by the queue engine (CHAIN_BROKEN,
            # CHAIN_ABORTED, MEMORY_ERROR on the slot); OK otherwise.
            "verdict": STATUS_BITS,
            # First stripe of the operand and first line of the result: the offsets within their
            # slots are already added.
            "operand_address": word_address_bits(config),
            "result_address": word_address_bits(config),
            "base": 64,
            "limit": 64,
            "submission_slot_log2": 5,
            "result_slot_log2": 5,
        }
    )


def completed_layout() -> data.StructLayout:
    """What the core reports of a descriptor once its last result line is acknowledged."""
    return data.StructLayout(
        {
            "descriptor": descriptor_layout,
            "queue": QUEUE_BITS,
            "status": STATUS_BITS,
            "numeric": NUMERIC_BITS,
            "result_bytes": 32,
            "cycles": 32,
        }
    )


def read_request_layout(config: NdpConfig) -> data.StructLayout:
    """A burst on one channel: ``length + 1`` words from channel-local word ``address``; never crosses 4 KiB."""
    return data.StructLayout({"address": word_address_bits(config), "length": 6})


read_response_layout = data.StructLayout({"data": WORD_BITS, "error": 1})
"""One word of a burst, in the order of the requests."""


def line_write_layout(config: NdpConfig) -> data.StructLayout:
    """A masked write of one 64-byte line at DPA word ``address``; ``tag`` comes back with its acknowledgement."""
    return data.StructLayout({"address": word_address_bits(config), "data": WORD_BITS, "strobe": WORD_BYTES, "tag": 1})


class ReadPort(wiring.Signature):
    """Reads of one channel by one requester, seen from the requester.

    Responses come in the order of the requests. The requester must always accept them: it asks for
    no more than it has room for.
    """

    def __init__(self, config: NdpConfig) -> None:
        super().__init__(
            {
                "request": Out(stream.Signature(read_request_layout(config))),
                "response": In(stream.Signature(read_response_layout, always_ready=True)),
            }
        )


class LineWritePort(wiring.Signature):
    """Writes of single lines, seen from the requester.

    ``ack`` pulses once for every acknowledged line, in any order; ``ack_tag`` is the line's tag.
    """

    def __init__(self, config: NdpConfig) -> None:
        super().__init__(
            {
                "line": Out(stream.Signature(line_write_layout(config))),
                "ack": In(1),
                "ack_error": In(1),
                "ack_tag": In(1),
            }
        )


__all__ = [
    "NUMERIC_BITS",
    "OPERAND_EXPONENT_BITS",
    "QUEUE_BITS",
    "SCALE_BITS",
    "STATUS_BITS",
    "WORD_BITS",
    "LineWritePort",
    "ReadPort",
    "completed_layout",
    "descriptor_layout",
    "exponents_layout",
    "fetched_layout",
    "line_write_layout",
    "read_request_layout",
    "read_response_layout",
    "word_address_bits",
]
