"""The control unit: follows every descriptor from the decoder to its completion."""

from __future__ import annotations

import functools
import operator

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import SOFTMAX_BANKS, NdpConfig
from plora.hw.defs.status import Status
from plora.hw.rtl.core.bursts import burst_layout
from plora.hw.rtl.core.channel_reader import conversion_layout
from plora.hw.rtl.core.collector import collected_layout
from plora.hw.rtl.core.dram_buffer import position_bits
from plora.hw.rtl.core.gate import JobGate
from plora.hw.rtl.core.input_buffer import ARRIVALS_BITS
from plora.hw.rtl.core.job import (
    FINISHED,
    JOB_SLOT_BITS,
    JOB_SLOTS,
    RECORDS,
    Region,
    decoded_layout,
    record_layout,
)
from plora.hw.rtl.core.operand_loader import OperandLoader, issued_layout, placement_layout
from plora.hw.rtl.core.result_writer import ACCOUNTS, lines_bits, result_layout
from plora.hw.rtl.core.retirement import Retirement, executed_layout
from plora.hw.rtl.core.sequencer import BeatSequencer, activity_layout, issue_layout
from plora.hw.rtl.core.weight_reader import WeightReader, weights_layout
from plora.hw.rtl.interfaces import NUMERIC_BITS, completed_layout
from plora.hw.rtl.queue import StreamQueue, next_index

read_failure_layout = data.StructLayout({"valid": 1, "slot": JOB_SLOT_BITS})
"""Memory failed a read of the job in that job slot."""


class ControlUnit(wiring.Component):
    """Splits what the decoder gives into work and record, runs the work, and joins both at the end.

    ::

        decoded --+--> records ------------------------------------------------> Retirement --> completed
                  |                                                                  ^  |
                  +--> OperandLoader --+--> jobs --> JobGate --> BeatSequencer --> executed
                         |             |                            |                   |
                       bursts          +--> weights --> WeightReader --> bursts        result --> writer
                                                                    |
                                                                  issue --> buffers, array

    Jobs pass every unit in order. Up to `JOB_SLOTS` of them have reads under way or beats to come, so
    the operands and weights of the next jobs arrive while one runs, and up to `FINISHED` wait for
    their results to be stored, written and acknowledged.

    Ports:
        decoded: from the decoder.
        operand_bursts, weight_bursts: what is to be read from all channels.
        conversions: for each job slot, what is done to the words of its operands.
        placements, arrivals, arrived, issue, weights_freed: see the buffers, the sequencer and the feeder.
        failures: reads that memory failed, one a channel.
        collected: of the result collector.
        scores_ahead, softmax_busy: of the softmax path.
        result, emptied, account, settled, write_failed, lines: see the result writer.
        completed: outcomes, in the order of ``decoded``.
        activity, waits_for_input: for the counters.
        idle: no descriptor is here.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        bursts = stream.Signature(burst_layout(config))
        super().__init__(
            {
                "decoded": In(stream.Signature(decoded_layout(config))),
                "operand_bursts": Out(bursts),
                "weight_bursts": Out(bursts),
                "conversions": Out(conversion_layout).array(JOB_SLOTS),
                "placements": Out(placement_layout(config)).array(JOB_SLOTS),
                "arrivals": In(ARRIVALS_BITS),
                "arrived": In(position_bits(config)),
                "issue": Out(stream.Signature(issue_layout(config))),
                "weights_freed": In(1),
                "failures": In(read_failure_layout).array(config.channels),
                "collected": In(collected_layout),
                "scores_ahead": In(1),
                "softmax_busy": In(SOFTMAX_BANKS),
                "result": Out(stream.Signature(result_layout(config))),
                "emptied": In(1),
                "account": In(range(ACCOUNTS)),
                "settled": In(ACCOUNTS),
                "write_failed": In(ACCOUNTS),
                "lines": In(lines_bits(config)),
                "completed": Out(stream.Signature(completed_layout())),
                "activity": Out(activity_layout),
                "waits_for_input": Out(1),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config = self._config
        m.submodules.records = records = StreamQueue(record_layout(config), RECORDS)
        m.submodules.loader = loader = OperandLoader(config)
        m.submodules.jobs = jobs = StreamQueue(issued_layout(config), JOB_SLOTS)
        m.submodules.weights = weights = StreamQueue(weights_layout(config), JOB_SLOTS)
        m.submodules.reader = reader = WeightReader(config)
        m.submodules.gate = gate = JobGate(config)
        m.submodules.sequencer = sequencer = BeatSequencer(config)
        m.submodules.executed = executed = StreamQueue(executed_layout, FINISHED)
        m.submodules.numeric = numeric = StreamQueue(NUMERIC_BITS, FINISHED)
        m.submodules.retirement = retirement = Retirement(config)

        # Decoder: the record always, the work where there is some and a job slot for it.
        decoded, is_job = self.decoded, Signal()
        slot, slots_used = Signal(range(JOB_SLOTS)), Signal(range(JOB_SLOTS + 1))
        slot_free, accept, accept_job = Signal(), Signal(), Signal()
        m.d.comb += [
            is_job.eq(decoded.payload.record.status == Status.OK),
            slot_free.eq(slots_used != JOB_SLOTS),
            decoded.ready.eq(records.input.ready & (~is_job | (slot_free & loader.input.ready))),
            accept.eq(decoded.valid & decoded.ready),
            accept_job.eq(accept & is_job),
            records.input.valid.eq(accept),
            records.input.payload.eq(decoded.payload.record),
            loader.input.valid.eq(decoded.valid & records.input.ready & is_job & slot_free),
            loader.input.payload.work.eq(decoded.payload.work),
            loader.input.payload.slot.eq(slot),
        ]
        m.d.sync += slots_used.eq(slots_used + accept_job - sequencer.ended.valid)
        work = decoded.payload.work
        with m.If(accept_job):
            m.d.sync += slot.eq(next_index(slot, JOB_SLOTS))
            with m.Switch(slot):
                for index, conversion in enumerate(self.conversions):
                    with m.Case(index):
                        m.d.sync += [
                            conversion.bf16.eq(work.bf16),
                            conversion.operand.eq(work.exponents.operand),
                            conversion.device.eq(work.exponents.device),
                        ]

        # Loader: each job to the weight reader and to the gate, which have room for one in every slot.
        placed = loader.output.payload
        m.d.comb += [
            loader.output.ready.eq(jobs.input.ready & weights.input.ready),
            jobs.input.valid.eq(loader.output.valid & loader.output.ready),
            jobs.input.payload.eq(placed),
            weights.input.valid.eq(loader.output.valid & loader.output.ready),
            weights.input.payload.address.eq(placed.work.weights_address),
            weights.input.payload.stripes.eq(placed.work.stripes),
            weights.input.payload.group.eq(placed.work.group_stripes),
            weights.input.payload.skip.eq(placed.work.skip),
            weights.input.payload.held.eq(placed.work.pairs > 1),
            weights.input.payload.slot.eq(placed.slot),
            loader.freed.eq(gate.freed),
            reader.freed.eq(self.weights_freed),
        ]
        for own, inner in zip(self.placements, loader.placements, strict=True):
            m.d.comb += own.eq(inner)
        connect(m, weights.output, reader.input)
        connect(m, loader.bursts, flipped(self.operand_bursts))
        connect(m, reader.bursts, flipped(self.weight_bursts))

        # Array.
        connect(m, jobs.output, gate.jobs)
        connect(m, gate.granted, sequencer.jobs)
        connect(m, sequencer.issue, flipped(self.issue))
        m.d.comb += [
            gate.arrivals.eq(self.arrivals),
            gate.collected.eq(self.collected.valid),
            gate.softmax_busy.eq(self.softmax_busy),
            gate.completed.eq(retirement.job_completed),
            gate.half_freed.eq(retirement.half_freed),
            sequencer.arrived.eq(self.arrived),
            sequencer.scores_ahead.eq(self.scores_ahead),
            self.activity.eq(sequencer.activity),
            self.waits_for_input.eq(gate.waits_for_input),
        ]

        # Failed reads belong to a job slot, until its job had its last beat: then all its words are there.
        failed = Signal(JOB_SLOTS)
        reported = Signal(JOB_SLOTS)
        m.d.comb += reported.eq(
            functools.reduce(operator.or_, (Mux(f.valid, 1 << f.slot, 0) for f in self.failures)),
        )
        m.d.sync += failed.eq((failed | reported) & ~Mux(accept_job, 1 << slot, 0))

        # Retirement.
        ended = sequencer.ended
        m.d.comb += [
            executed.input.valid.eq(ended.valid),
            executed.input.payload.half.eq(ended.region == Region.HALF_1),
            executed.input.payload.read_error.eq(failed.bit_select(ended.slot, 1)),
            executed.input.payload.cycles.eq(ended.cycles),
            numeric.input.valid.eq(self.collected.valid),
            numeric.input.payload.eq(self.collected.numeric),
            retirement.emptied.eq(self.emptied),
            retirement.account.eq(self.account),
            retirement.settled.eq(self.settled),
            retirement.failed.eq(self.write_failed),
            retirement.lines.eq(self.lines),
            self.idle.eq((records.level == 0) & ~retirement.busy),
        ]
        connect(m, records.output, retirement.records)
        connect(m, executed.output, retirement.executed)
        connect(m, numeric.output, retirement.numeric)
        connect(m, retirement.result, flipped(self.result))
        connect(m, retirement.completed, flipped(self.completed))
        return m
