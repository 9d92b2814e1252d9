"""One channel's side of reading: bursts out, words in, each to the buffer that asked for it."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.core.bursts import LENGTH_BITS, burst_layout
from plora.hw.rtl.core.job import JOB_SLOT_BITS, JOB_SLOTS
from plora.hw.rtl.interfaces import OPERAND_EXPONENT_BITS, WORD_BITS, read_request_layout, read_response_layout
from plora.hw.rtl.queue import StreamQueue

BURSTS_IN_FLIGHT = 8
"""Bursts of a channel that were asked for and not answered to the end. Of full bursts, enough for a
memory latency of several hundred cycles."""

word_layout = data.StructLayout(
    {
        "valid": 1,
        "operand": 1,
        "slot": JOB_SLOT_BITS,
        # First and last word of an operand.
        "start": 1,
        "end": 1,
        "data": WORD_BITS,
        "error": 1,
    }
)
"""A word that arrived; the fields but ``valid`` as in `plora.hw.rtl.core.bursts.burst_layout`."""


conversion_layout = data.StructLayout(
    {"bf16": 1, "operand": signed(OPERAND_EXPONENT_BITS), "device": signed(OPERAND_EXPONENT_BITS)}
)
"""What is done to the words of a job: whether its operands are BF16, and the exponents of both."""


class ChannelReader(wiring.Component):
    """Sends bursts to one channel and labels the words that come back, in the order of the bursts.

    Beside each word goes how it is to be converted (`plora.hw.rtl.pe.converter.WordConverter`). That comes from
    registers, which are loaded with the label of the burst, as early as its first word can come.

    Ports:
        bursts: taken while fewer than `BURSTS_IN_FLIGHT` are in flight.
        request, response_valid, response: the channel's `plora.hw.rtl.interfaces.ReadPort`, piece by piece
            (a port that is always ready cannot stand at the border of an emitted module).
        conversions: by job slot; must stand from the job's first burst to its last word.
        word: the word that arrives in this cycle. It passes within the cycle.
        bf16, exponent: of that word.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "bursts": In(stream.Signature(burst_layout(config))),
                "request": Out(stream.Signature(read_request_layout(config))),
                "response_valid": In(1),
                "response": In(read_response_layout),
                "conversions": In(conversion_layout).array(JOB_SLOTS),
                "word": Out(word_layout),
                "bf16": Out(1),
                "exponent": Out(signed(OPERAND_EXPONENT_BITS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        burst = self.bursts.payload
        label = data.StructLayout({"operand": 1, "slot": JOB_SLOT_BITS, "start": 1, "end": 1, "length": LENGTH_BITS})
        m.submodules.requests = requests = StreamQueue(read_request_layout(self._config), 2)
        m.submodules.labels = labels = StreamQueue(label, BURSTS_IN_FLIGHT)
        connect(m, requests.output, flipped(self.request))
        # The burst whose words come now is out of the queue.
        under_way = Signal()
        expected, conversion = Signal(label, reset_less=True), Signal(conversion_layout)
        following, finished = labels.output.payload, Signal()
        with m.Switch(following.slot):
            for slot, candidate in enumerate(self.conversions):
                with m.Case(slot):
                    m.d.comb += conversion.eq(candidate)
        m.d.comb += labels.output.ready.eq(~under_way | finished)
        with m.If(labels.output.ready):
            m.d.sync += [
                under_way.eq(labels.output.valid),
                expected.eq(following),
                self.bf16.eq(conversion.bf16),
                self.exponent.eq(Mux(following.operand, conversion.operand, conversion.device)),
            ]
        m.d.comb += [
            self.bursts.ready.eq(requests.input.ready & (labels.level + under_way != BURSTS_IN_FLIGHT)),
            requests.input.valid.eq(self.bursts.valid & self.bursts.ready),
            requests.input.payload.address.eq(burst.address),
            requests.input.payload.length.eq(burst.length),
            labels.input.valid.eq(self.bursts.valid & self.bursts.ready),
            *(labels.input.payload[name].eq(burst[name]) for name, _ in label),
        ]

        index = Signal(LENGTH_BITS)
        first, last = Signal(), Signal()
        m.d.comb += [
            first.eq(index == 0),
            last.eq(index == expected.length),
            self.word.valid.eq(self.response_valid),
            self.word.operand.eq(expected.operand),
            self.word.slot.eq(expected.slot),
            self.word.start.eq(expected.start & first),
            self.word.end.eq(expected.end & last),
            self.word.data.eq(self.response.data),
            self.word.error.eq(self.response.error),
            finished.eq(self.response_valid & last),
        ]
        with m.If(self.response_valid):
            m.d.sync += index.eq(index + 1)
            with m.If(last):
                m.d.sync += index.eq(0)
        return m
