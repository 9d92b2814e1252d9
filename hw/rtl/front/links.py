"""How requesters inside the device reach one memory channel, and how a DPA maps to a channel."""

from __future__ import annotations

from typing import NamedTuple

from amaranth.hdl import Const, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.rtl.interfaces import WORD_BITS, word_address_bits

TAG_BITS = 2
"""Bits by which a requester tells its own accesses apart; they come back with the answer."""

CORE, HOST, QUEUES = range(3)
"""The requesters of a channel, by their index at `ChannelPort` (bits 5:4 of the transaction id)."""

REQUESTERS = 3

EPOCH_BITS = 2
"""Bits 3:2 of a transaction id: how often the watchdog gave up on the requester's accesses, modulo 4."""


class Debt(NamedTuple):
    """What memory may owe a requester: tags in use (from 0 on), and words or acknowledgements of each at most."""

    tags: int
    most: int


READ_DEBTS = (Debt(1, 1023), Debt(1, 64), Debt(1 << TAG_BITS, 1))
"""By requester. The core has eight bursts of 64 words under way at most, the host port a line a ticket."""

WRITE_DEBTS = (Debt(2, 1023), Debt(1, 64), Debt(1 << TAG_BITS, 1))

LOG2_WORD_BYTES = WORD_BYTES.bit_length() - 1


def channel_bits(config: NdpConfig) -> int:
    """Low bits of a DPA word address that name the channel; 0 for a single channel."""
    return config.channels.bit_length() - 1


def channel_of(config: NdpConfig, word: Value) -> Value:
    """Channel of DPA word address ``word``."""
    bits = channel_bits(config)
    return word[:bits] if bits else Const(0, 1)


def local_of(config: NdpConfig, word: Value) -> Value:
    """Channel-local word address of DPA word address ``word``."""
    return word[channel_bits(config) :]


def channel_read_layout(config: NdpConfig) -> data.StructLayout:
    """A burst of ``length + 1`` words from channel-local word ``address``; never crosses 4 KiB."""
    return data.StructLayout({"address": word_address_bits(config), "length": 6, "tag": TAG_BITS})


word_layout = data.StructLayout({"data": WORD_BITS, "error": 1, "tag": TAG_BITS})
"""One word of a burst."""


def channel_write_layout(config: NdpConfig) -> data.StructLayout:
    """A masked write of channel-local word ``address``."""
    return data.StructLayout(
        {"address": word_address_bits(config), "data": WORD_BITS, "strobe": WORD_BYTES, "tag": TAG_BITS}
    )


ack_layout = data.StructLayout({"error": 1, "tag": TAG_BITS})
"""Memory's answer to one write."""


class ChannelRead(wiring.Signature):
    """Reads of one channel, seen from the requester. Bursts of equal tag are answered in order."""

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "request": Out(stream.Signature(channel_read_layout(config))),
                "response": In(stream.Signature(word_layout)),
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelRead) and self._config == other._config

    def __repr__(self) -> str:
        return f"ChannelRead({self._config.name!r})"


class ChannelWrite(wiring.Signature):
    """Writes of one channel, seen from the requester. Writes of equal tag are answered in order."""

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "line": Out(stream.Signature(channel_write_layout(config))),
                "ack": In(stream.Signature(ack_layout)),
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelWrite) and self._config == other._config

    def __repr__(self) -> str:
        return f"ChannelWrite({self._config.name!r})"
