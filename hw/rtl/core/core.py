"""The NDP core."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import connect, flipped

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.core.bursts import BurstBroadcast
from plora.hw.rtl.core.channel_reader import ChannelReader, word_layout
from plora.hw.rtl.core.collector import ResultCollector
from plora.hw.rtl.core.control import ControlUnit
from plora.hw.rtl.core.counters import Counters
from plora.hw.rtl.core.decoder import Decoder
from plora.hw.rtl.core.dram_buffer import DramBuffer
from plora.hw.rtl.core.feeder import BeatFeeder
from plora.hw.rtl.core.input_buffer import InputBuffer
from plora.hw.rtl.core.instruction_buffer import InstructionBuffer
from plora.hw.rtl.core.job import result_tag_bits
from plora.hw.rtl.core.output_buffer import OutputBuffer
from plora.hw.rtl.core.result_writer import ResultWriter
from plora.hw.rtl.core.signature import NdpCoreSignature
from plora.hw.rtl.core.softmax_path import SoftmaxPath
from plora.hw.rtl.pe.array import PeArray
from plora.hw.rtl.pe.converter import WordConverter

FEEDER, COLLECTOR = range(2)
"""Who reads the states of the softmax unit."""


class NdpCore(wiring.Component):
    """Executes descriptors, strictly in the order in which they come. Fig. 5(c) of the paper.

    ::

        fetched -> InstructionBuffer -> Decoder -> ControlUnit -> completed
                                                    |   |  ^
                     bursts <-----------------------+   |  +------------------ ResultWriter -> write
                       v                                |                           ^
        read <-> ChannelReader, WordConverter
                               per channel -+-> DramBuffer --+                      |
                                            +-> InputBuffer -+-> BeatFeeder -> PeArray -> SoftmaxPath
                                                  kept words |                                |
                                                  and terms  +--- OutputBuffer <-- ResultCollector

    The memory delivers one stripe a cycle, the array eats one a cycle, and everything between is there
    to keep it so: operands and weights of later jobs are read while one runs, results of earlier jobs
    are written meanwhile. The weights of a job with more than one pair of operand rows are read from
    memory once, and from the DRAM buffer for every further pair.

    Ports: `plora.hw.rtl.core.signature.NdpCoreSignature`.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(NdpCoreSignature(config))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config = self._config
        m.submodules.instruction_buffer = instructions = InstructionBuffer(config)
        m.submodules.decoder = decoder = Decoder(config)
        m.submodules.control = control = ControlUnit(config)
        m.submodules.broadcast = broadcast = BurstBroadcast(config)
        m.submodules.dram_buffer = dram_buffer = DramBuffer(config)
        m.submodules.input_buffer = input_buffer = InputBuffer(config)
        m.submodules.feeder = feeder = BeatFeeder(config)
        m.submodules.array = array = PeArray(config, tag_bits=result_tag_bits(config))
        m.submodules.softmax = softmax = SoftmaxPath(config, approach=BeatFeeder.LATENCY + array.latency)
        m.submodules.collector = collector = ResultCollector(config)
        m.submodules.output_buffer = output_buffer = OutputBuffer(config)
        m.submodules.writer = writer = ResultWriter(config)
        m.submodules.counters = counters = Counters(config)

        # Descriptors.
        connect(m, flipped(self.fetched), instructions.fetched)
        connect(m, instructions.output, decoder.input)
        connect(m, decoder.output, control.decoded)
        connect(m, control.completed, flipped(self.completed))
        m.d.comb += self.idle.eq(~self.fetched.valid & (instructions.level == 0) & control.idle)

        # Reads.
        connect(m, control.operand_bursts, broadcast.operands)
        connect(m, control.weight_bursts, broadcast.weights)
        for channel in range(config.channels):
            reader = ChannelReader(config)
            add_shared(m, platform, f"reader_{channel}", f"channel_reader_{config.name}", reader)
            connect(m, broadcast.channels[channel], reader.bursts)
            converter = WordConverter()
            add_shared(m, platform, f"converter_{channel}", "word_converter", converter)
            word = Signal(word_layout, name=f"word_{channel}")
            port, failure = self.read[channel], control.failures[channel]
            connect(m, reader.request, flipped(port.request))
            m.d.comb += [
                reader.response_valid.eq(port.response.valid),
                reader.response.eq(port.response.payload),
                converter.data.eq(reader.word.data),
                converter.bf16.eq(reader.bf16),
                converter.exponent.eq(reader.exponent),
                word.eq(reader.word),
                word.data.eq(converter.converted),
                dram_buffer.words[channel].eq(word),
                input_buffer.words[channel].eq(word),
                *(own.eq(given) for own, given in zip(reader.conversions, control.conversions, strict=True)),
                failure.valid.eq(reader.word.valid & reader.word.error),
                failure.slot.eq(reader.word.slot),
            ]
        for inner, placement in zip(input_buffer.placements, control.placements, strict=True):
            m.d.comb += inner.eq(placement)
        m.d.comb += [control.arrivals.eq(input_buffer.arrivals), control.arrived.eq(dram_buffer.arrived)]

        # Beats: the operand is read in the cycle in which the feeder takes the beat's control.
        issue = control.issue.payload
        read = control.issue.valid & control.issue.ready
        m.d.comb += [
            feeder.control.valid.eq(control.issue.valid),
            feeder.control.payload.eq(issue.control),
            control.issue.ready.eq(feeder.control.ready),
            dram_buffer.read_position.eq(feeder.weights_position),
            dram_buffer.read_enable.eq(feeder.weights_enable),
            control.weights_freed.eq(feeder.weights_freed),
            input_buffer.read_address.eq(issue.input_address),
            input_buffer.read_enable.eq(read & issue.input_enable),
            output_buffer.kept_address.eq(issue.kept_address),
            output_buffer.kept_enable.eq(read & issue.kept_enable),
            feeder.weights.eq(dram_buffer.stripe),
            feeder.stripes.eq(input_buffer.stripes),
            feeder.kept.eq(output_buffer.kept),
            feeder.anchors.eq(output_buffer.anchors),
            softmax.reads[FEEDER].pair.eq(issue.state_pair),
            softmax.reads[FEEDER].enable.eq(read & issue.state_enable),
            feeder.states.eq(softmax.reads[FEEDER].states),
        ]
        connect(m, feeder.beats, array.beats)

        # Results.
        connect(m, array.results, softmax.results)
        connect(m, softmax.values, collector.results)
        m.d.comb += [
            softmax.reads[COLLECTOR].pair.eq(collector.state_pair),
            softmax.reads[COLLECTOR].enable.eq(collector.state_enable),
            collector.states.eq(softmax.reads[COLLECTOR].states),
            control.scores_ahead.eq(softmax.ahead),
            control.softmax_busy.eq(softmax.busy),
            output_buffer.write.eq(collector.write),
            control.collected.eq(collector.collected),
            control.emptied.eq(writer.emptied),
            control.account.eq(writer.account),
            control.settled.eq(writer.settled),
            control.write_failed.eq(writer.failed),
            control.lines.eq(writer.lines),
            output_buffer.result_half.eq(writer.half),
            output_buffer.result_row.eq(writer.row),
            output_buffer.result_address.eq(writer.address),
            output_buffer.result_enable.eq(writer.enable),
            writer.word.eq(output_buffer.result),
        ]
        connect(m, control.result, writer.result)
        connect(m, writer.write, flipped(self.write))

        # Counters.
        m.d.comb += [
            counters.activity.eq(control.activity),
            counters.waits_for_input.eq(control.waits_for_input),
            counters.words_read.eq(Cat(port.response.valid for port in self.read)),
            counters.word_written.eq(self.write.line.valid & self.write.line.ready),
            counters.clear.eq(self.clear_counters),
            self.counters.eq(counters.values),
        ]
        return m
