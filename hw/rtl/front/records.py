"""Records of a queue: what the host configures, what the engine keeps, and the commands between the two."""

from __future__ import annotations

from enum import IntEnum

from amaranth.hdl import unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.queue import MAX_DEPTH, PASS_BITS
from plora.hw.defs.registers import QUEUE, RESET_CHAIN_LIMIT, RESET_CHAIN_TIMEOUT, RESET_POLL_INTERVAL, Access, Register
from plora.hw.rtl.front.axi import msix_layout
from plora.hw.rtl.interfaces import word_address_bits

REGISTER_BITS = 32

COUNT_BITS = 16
"""Descriptors and completions are counted modulo ``2**COUNT_BITS``."""

LIVE_REGISTERS = ("CTRL", "CQ_HEAD")
"""Writable queue registers that act at once; all others only configure and rest in a memory."""

CONFIG_REGISTERS: tuple[Register, ...] = tuple(
    r for r in QUEUE if r.access is Access.RW and r.name not in LIVE_REGISTERS
)


def _config_fields() -> dict[str, int]:
    fields = {}
    for register in CONFIG_REGISTERS:
        if register.name.endswith("_LO"):
            fields[register.name.removesuffix("_LO").lower()] = 2 * REGISTER_BITS
        elif not register.name.endswith("_HI"):
            fields[register.name.lower()] = REGISTER_BITS
    return fields


queue_config_layout = data.StructLayout({name: unsigned(width) for name, width in _config_fields().items()})
"""The configuration registers of one queue in the order of their offsets; halves of 64 bits joined."""


def queue_index_bits(config: NdpConfig) -> int:
    """Bits that number the queues of the device, at least 1."""
    return max(1, (config.queues - 1).bit_length())


def queue_memory_depth(config: NdpConfig) -> int:
    """Entries of a memory with one entry a queue, at least 2."""
    return max(2, config.queues)


FAULT_BITS = 2


class Fault(IntEnum):
    """What the next descriptor of a queue gets because its chain was closed too early."""

    NONE = 0
    BROKEN = 1
    ABORTED = 2


INDEX_BITS = (MAX_DEPTH - 1).bit_length()


def queue_state_layout(config: NdpConfig) -> data.StructLayout:
    """What the engine keeps of one queue.

    ============  ===============================================================================
    next_*        the slot to be read next: index, pass, DPA word address, and how many were
                  read before it since enabling
    result_slot   DPA word of the result slot of the next descriptor to be handed to the core
    done_*        the result slot to be completed next: index, pass, DPA word
    fetched       descriptors handed to the core since enabling
    tail          completions that memory has acknowledged since enabling
    head          completions that the host has taken
    under_way     descriptors handed to the core and not yet done with
    gathered      completions since the last interrupt that none was sent for
    since         cycle, by the engine's own clock, of the first of them
    errors        register QERRORS
    fault         see `Fault`
    ============  ===============================================================================
    """
    word = word_address_bits(config)
    return data.StructLayout(
        {
            "next_index": INDEX_BITS,
            "next_pass": PASS_BITS,
            "next_slot": word,
            "next_count": COUNT_BITS,
            "result_slot": word,
            "done_index": INDEX_BITS,
            "done_pass": PASS_BITS,
            "done_slot": word,
            "fetched": COUNT_BITS,
            "tail": COUNT_BITS,
            "head": COUNT_BITS,
            "under_way": COUNT_BITS,
            "gathered": COUNT_BITS,
            "since": REGISTER_BITS,
            "errors": REGISTER_BITS,
            "fault": FAULT_BITS,
        }
    )


queue_status_layout = data.StructLayout(
    {"fetched": COUNT_BITS, "tail": COUNT_BITS, "head": COUNT_BITS, "errors": REGISTER_BITS, "busy": 1}
)
"""What the registers show of a queue's state."""


COMMAND_BITS = 2


class Command(IntEnum):
    """What a register write asks of the queue engine."""

    ENABLE = 0
    DISABLE = 1
    HEAD = 2


def command_layout(config: NdpConfig) -> data.StructLayout:
    """A command for one queue; ``value`` is the new CQ_HEAD of ``HEAD``."""
    return data.StructLayout({"kind": COMMAND_BITS, "queue": queue_index_bits(config), "value": REGISTER_BITS})


class QueueControl(wiring.Signature):
    """Between registers and queue engine, seen from the registers.

    Members:
        config_queue, config: the engine asks for a queue's configuration in one cycle and has it in
            the next.
        vector: entry of the MSI-X table with the number ``config_queue``, likewise in the next cycle.
        deliver: by vector, a message may be sent.
        pending: by vector, a message is to be sent.
        status_queue, status: likewise the registers for its state.
        command, command_done: a register write that the engine has to carry out; ``command_done`` pulses
            when it has, in the cycle in which it took the command or later.
        doorbell, doorbell_queue: a doorbell was rung.
        enabled: by queue.
        interrupt_enable: by queue.
        chain_limit, chain_timeout, poll_interval: values of those registers.
        descriptor_done, descriptor_failed: pulses, to be counted.
        busy: some queue has work under way.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        index = queue_index_bits(config)
        super().__init__(
            {
                "config_queue": In(index),
                "config": Out(queue_config_layout),
                "vector": Out(msix_layout),
                "deliver": Out(config.queues),
                "pending": In(config.queues),
                "status_queue": Out(index),
                "status": In(queue_status_layout),
                "command": Out(stream.Signature(command_layout(config))),
                "command_done": In(1),
                "doorbell": Out(1),
                "doorbell_queue": Out(index),
                "enabled": In(config.queues),
                "interrupt_enable": Out(config.queues),
                "chain_limit": Out(COUNT_BITS, init=RESET_CHAIN_LIMIT),
                "chain_timeout": Out(REGISTER_BITS, init=RESET_CHAIN_TIMEOUT),
                "poll_interval": Out(REGISTER_BITS, init=RESET_POLL_INTERVAL),
                "descriptor_done": In(1),
                "descriptor_failed": In(1),
                "busy": In(1),
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueueControl) and self._config == other._config

    def __repr__(self) -> str:
        return f"QueueControl({self._config.name!r})"
