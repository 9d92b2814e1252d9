"""Retirement: turns records back into completions, in order, once their work is done."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import Keep
from plora.hw.defs.status import Status
from plora.hw.rtl.core.job import RESULT_HALVES, record_layout
from plora.hw.rtl.core.result_writer import ACCOUNTS, lines_bits, result_layout
from plora.hw.rtl.core.sequencer import CYCLES_BITS
from plora.hw.rtl.interfaces import NUMERIC_BITS, QUEUE_BITS, STATUS_BITS, completed_layout, descriptor_layout

executed_layout = data.StructLayout({"half": range(RESULT_HALVES), "read_error": 1, "cycles": CYCLES_BITS})
"""A job that had its last beat: its result half, whether memory failed a read, first to last beat."""

WORD_BYTES_LOG2 = (WORD_BYTES - 1).bit_length()


settlement_layout = data.StructLayout(
    {
        "descriptor": descriptor_layout,
        "queue": QUEUE_BITS,
        "status": STATUS_BITS,
        "numeric": NUMERIC_BITS,
        "cycles": CYCLES_BITS,
        "written": 1,
        "account": range(ACCOUNTS),
    }
)
"""A descriptor whose outcome is known but for the acknowledgements of its lines, if it has ``written`` some."""


class Retirement(wiring.Component):
    """Completes descriptors in the order in which they came, in two steps.

    First its result, if it has one for memory, is sent; then, while that of the next may be sent, its
    acknowledgements are waited for.

    ====================================  =================  ==============================================
    descriptor                            waits for          status
    ====================================  =================  ==============================================
    refused by queue engine or decoder    -                  theirs
    after one of its chain that failed    as if it had not   CHAIN_ABORTED; nothing is written
    a read failed                         its last beat      MEMORY_ERROR; nothing is written
    sums stay in the accumulators         its last beat      OK
    result is kept                        its last value     OK
    result goes to memory                 its last           OK, or MEMORY_ERROR if memory refused a line
                                          acknowledgement
    ====================================  =================  ==============================================

    A descriptor that continues a chain is looked at only when the one before it is completed, since it
    must not write if that failed. A job whose chain has failed still runs, because its data is on its
    way already; only its outcome is dropped.

    Ports:
        records: from the decoder.
        executed: legal jobs, in the same order.
        numeric: numeric flags of jobs with results, in the same order, once all results are stored.
        result: to the result writer.
        emptied, account, settled, failed, lines: see the result writer.
        half_freed: result halves that will not be read any more.
        completed: outcomes.
        job_completed: a job from ``executed`` needs nothing of the core but acknowledgements.
        busy: a descriptor waits for its acknowledgements or for ``completed`` to be taken.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "records": In(stream.Signature(record_layout(config))),
                "executed": In(stream.Signature(executed_layout)),
                "numeric": In(stream.Signature(NUMERIC_BITS)),
                "result": Out(stream.Signature(result_layout(config))),
                "emptied": In(1),
                "account": In(range(ACCOUNTS)),
                "settled": In(ACCOUNTS),
                "failed": In(ACCOUNTS),
                "lines": In(lines_bits(config)),
                "half_freed": Out(RESULT_HALVES),
                "completed": Out(stream.Signature(completed_layout())),
                "job_completed": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        record, executed = self.records.payload, self.executed.payload
        d, result, completed = record.descriptor, self.result.payload, self.completed.payload

        # Second step.
        settling, waiting = Signal(settlement_layout, reset_less=True), Signal()
        lines = Signal.like(self.lines)
        chain_failed = Signal()
        refused, completes = Signal(), Signal()
        m.d.comb += [
            self.busy.eq(waiting),
            refused.eq(settling.written & self.failed.bit_select(settling.account, 1)),
            self.completed.valid.eq(waiting & (~settling.written | self.settled.bit_select(settling.account, 1))),
            completes.eq(self.completed.valid & self.completed.ready),
            completed.descriptor.eq(settling.descriptor),
            completed.queue.eq(settling.queue),
            completed.status.eq(Mux(refused, Status.MEMORY_ERROR, settling.status)),
        ]
        with m.If(completed.status == Status.OK):
            m.d.comb += [
                completed.numeric.eq(settling.numeric),
                completed.result_bytes.eq(Mux(settling.written, lines << WORD_BYTES_LOG2, 0)),
                completed.cycles.eq(settling.cycles),
            ]
        with m.If(completes):
            m.d.sync += [waiting.eq(0), chain_failed.eq(settling.descriptor.chain & (completed.status != Status.OK))]

        # First step.
        is_job, has_results, to_memory, there = Signal(), Signal(), Signal(), Signal()
        status = Signal(STATUS_BITS)
        passes = Signal()
        m.d.comb += [
            is_job.eq(record.status == Status.OK),
            has_results.eq(is_job & ~d.acc_out),
            to_memory.eq(has_results & (d.keep == Keep.NONE)),
            there.eq(
                self.records.valid
                & (record.first | ~waiting)
                & (~is_job | (self.executed.valid & (~has_results | self.numeric.valid)))
            ),
            self.records.ready.eq(passes),
            self.executed.ready.eq(passes & is_job),
            self.numeric.ready.eq(passes & has_results),
            self.job_completed.eq(passes & is_job),
            result.address.eq(record.result_address),
            result.half.eq(executed.half),
            result.rows.eq(d.gpu_rows),
            result.columns.eq(d.device_rows),
            result.anchors.eq(d.transpose),
        ]
        with m.If(chain_failed & ~record.first & ~record.verdict):
            m.d.comb += status.eq(Status.CHAIN_ABORTED)
        with m.Elif(is_job & executed.read_error):
            m.d.comb += status.eq(Status.MEMORY_ERROR)
        with m.Else():
            m.d.comb += status.eq(record.status)

        sent, account, sent_lines = Signal(), Signal.like(self.account), Signal.like(self.lines)
        writes = to_memory & (status == Status.OK)
        m.d.comb += [
            self.result.valid.eq(there & writes & ~sent),
            passes.eq(there & (sent | ~writes) & (~waiting | completes)),
        ]
        with m.If(self.result.valid & self.result.ready):
            m.d.sync += [sent.eq(1), account.eq(self.account), sent_lines.eq(self.lines)]
        with m.If(self.emptied):
            m.d.comb += self.half_freed.eq(1 << executed.half)
        with m.If(passes):
            m.d.sync += [
                sent.eq(0),
                waiting.eq(1),
                lines.eq(sent_lines),
                settling.descriptor.eq(d),
                settling.queue.eq(record.queue),
                settling.status.eq(status),
                settling.numeric.eq(Mux(has_results, self.numeric.payload, 0)),
                settling.cycles.eq(executed.cycles),
                settling.written.eq(sent),
                settling.account.eq(account),
            ]
            with m.If(to_memory & ~sent):
                m.d.comb += self.half_freed.eq(1 << executed.half)
        return m
