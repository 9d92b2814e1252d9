"""Retirement: turns records back into completions, in order, once their work is done."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import Keep
from plora.hw.defs.status import Status
from plora.hw.rtl.core.job import RESULT_HALVES, record_layout
from plora.hw.rtl.core.result_writer import lines_bits, result_layout
from plora.hw.rtl.core.sequencer import CYCLES_BITS
from plora.hw.rtl.interfaces import NUMERIC_BITS, STATUS_BITS, completed_layout

executed_layout = data.StructLayout({"half": range(RESULT_HALVES), "read_error": 1, "cycles": CYCLES_BITS})
"""A job that had its last beat: its result half, whether memory failed a read, first to last beat."""

WORD_BYTES_LOG2 = (WORD_BYTES - 1).bit_length()


class Retirement(wiring.Component):
    """Completes descriptors in the order in which they came.

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

    A job whose chain has failed meanwhile still runs, because its data is on its way already; only its
    outcome is dropped.

    Ports:
        records: from the decoder.
        executed: legal jobs, in the same order.
        numeric: numeric flags of jobs with results, in the same order, once all results are stored.
        result: to the result writer.
        write_failed, written_lines: of the result writer.
        half_freed: that half will not be read.
        completed: outcomes.
        job_completed: a job from ``executed`` is completed.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "records": In(stream.Signature(record_layout(config))),
                "executed": In(stream.Signature(executed_layout)),
                "numeric": In(stream.Signature(NUMERIC_BITS)),
                "result": Out(stream.Signature(result_layout(config))),
                "write_failed": In(1),
                "written_lines": In(lines_bits(config)),
                "half_freed": Out(RESULT_HALVES),
                "completed": Out(stream.Signature(completed_layout())),
                "job_completed": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        record, executed = self.records.payload, self.executed.payload
        d, result, completed = record.descriptor, self.result.payload, self.completed.payload
        is_job, has_results, to_memory = Signal(), Signal(), Signal()
        done = Signal()
        m.d.comb += [
            is_job.eq(record.status == Status.OK),
            has_results.eq(is_job & ~d.acc_out),
            to_memory.eq(has_results & (d.keep == Keep.NONE)),
            done.eq(self.completed.valid & self.completed.ready),
            self.records.ready.eq(done),
            self.executed.ready.eq(done & is_job),
            self.numeric.ready.eq(done & has_results),
            self.job_completed.eq(done & is_job),
            result.address.eq(record.result_address),
            result.half.eq(executed.half),
            result.rows.eq(d.gpu_rows),
            result.columns.eq(d.device_rows),
        ]

        chain_failed = Signal()
        verdict = Signal(STATUS_BITS)
        with m.If(chain_failed & ~record.first & ~record.verdict):
            m.d.comb += verdict.eq(Status.CHAIN_ABORTED)
        with m.Elif(is_job & executed.read_error):
            m.d.comb += verdict.eq(Status.MEMORY_ERROR)
        with m.Else():
            m.d.comb += verdict.eq(record.status)

        status = Signal(STATUS_BITS)
        lines = Signal.like(self.written_lines)
        with m.FSM():
            with m.State("WAIT"):
                m.d.sync += [status.eq(verdict), lines.eq(0)]
                with m.If(self.records.valid & (~is_job | (self.executed.valid & (~has_results | self.numeric.valid)))):
                    m.next = "COMPLETE"
                    with m.If(to_memory):
                        with m.If(verdict == Status.OK):
                            m.next = "WRITE"
                        with m.Else():
                            m.d.comb += self.half_freed.eq(1 << executed.half)
            with m.State("WRITE"):
                m.d.comb += self.result.valid.eq(1)
                m.d.sync += [
                    status.eq(Mux(self.write_failed, Status.MEMORY_ERROR, Status.OK)),
                    lines.eq(self.written_lines),
                ]
                with m.If(self.result.ready):
                    m.next = "COMPLETE"
            with m.State("COMPLETE"):
                m.d.comb += self.completed.valid.eq(1)
                with m.If(self.completed.ready):
                    m.d.sync += chain_failed.eq(d.chain & (status != Status.OK))
                    m.next = "WAIT"

        m.d.comb += [completed.descriptor.eq(d), completed.queue.eq(record.queue), completed.status.eq(status)]
        with m.If(status == Status.OK):
            m.d.comb += [
                completed.numeric.eq(Mux(has_results, self.numeric.payload, 0)),
                completed.result_bytes.eq(lines << WORD_BYTES_LOG2),
                completed.cycles.eq(executed.cycles),
            ]
        return m
