"""The beat sequencer: walks through a job, one beat a cycle."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import DOT_LANES, DOTS_PER_WORD, PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.defs.packing import FRAME_SCALES, frame_tokens
from plora.hw.rtl.core.dram_buffer import position_bits
from plora.hw.rtl.core.expander import EXPANSION_BITS
from plora.hw.rtl.core.feeder import beat_control_layout
from plora.hw.rtl.core.job import (
    JOB_SLOT_BITS,
    REGION_BITS,
    SOFTMAX_PAIRS,
    SOFTMAX_STATES,
    Destination,
    Region,
    input_capacity,
    kept_word_bits,
    result_address_bits,
    result_tag_layout,
    work_layout,
)

CYCLES_BITS = 32
SCORES_BITS = 6
"""Bits of the number of groups whose scores may still be overtaken: more than fit feeder, array and
softmax unit together."""
LANE_BITS = (WORD_VALUES - 1).bit_length()


def granted_layout(config: NdpConfig) -> data.StructLayout:
    """A job that may run: its work, its job slot, where its operand begins, and the region of its results."""
    return data.StructLayout(
        {
            "work": work_layout(config),
            "slot": JOB_SLOT_BITS,
            "operand_base": range(input_capacity(config)),
            "region": REGION_BITS,
        }
    )


def issue_layout(config: NdpConfig) -> data.StructLayout:
    """A beat: the operand to read, and what goes with it.

    A buffer is read only where the beat's words are not in the word or stripe that it shows already.
    ``state_pair`` is the pair of states with the final anchors that a token-wise beat needs.
    """
    return data.StructLayout(
        {
            "input_address": range(input_capacity(config)),
            "input_enable": 1,
            "kept_address": range(config.kept_words),
            "kept_enable": 1,
            "state_pair": range(SOFTMAX_STATES),
            "state_enable": 1,
            "control": beat_control_layout(config),
        }
    )


ended_layout = data.StructLayout({"valid": 1, "slot": JOB_SLOT_BITS, "region": REGION_BITS, "cycles": CYCLES_BITS})
"""A job that has its last beat in this cycle, and the cycles since its first, both counted."""

activity_layout = data.StructLayout({"beat": 1, "span": 1, "stall_weights": 1, "stall_drain": 1})
"""What this cycle is, for the counters of the same names."""


class BeatSequencer(wiring.Component):
    """For each row group, for each pair of operand rows, for each stripe of the group: a beat.

    ::

        stripe     0 1 2 | 0 1 2 | 3 4 5 | 3 4 5      two groups of three beats, two pairs of rows
        pair       0 0 0 | 1 1 1 | 0 0 0 | 1 1 1
        sums       F   L | F   L | F   L | F   L      first and last beat of each sum
        last use         | 0 1 2 |       | 3 4 5      of the stripe: in the pass of the last pair

    A beat waits until its stripe has arrived; everything else a job needs is there before it comes
    here. Between the last beat of a job and the first of the next lies one cycle. Results that do not pass
    the softmax unit must not overtake those that do: a beat that completes such results waits until all scores
    before it are so far through that unit that its results come after theirs.

    A token-wise beat takes half a kept word, 16 softmax terms. Its results, two in a row, and after those
    of a row's last group the row's anchor, need a pause of the array, as do scores, which the softmax unit takes
    row by row.

    Integers, two beats a stripe; of keys a frame holds 64 groups, of values so many beats of one::

        stripe     0 | 1 1 2 | 1 1 2 | 2 3 3 | 2 3 3      keys: a stripe of scales, then groups without gaps
        beat       S | 0 1 2 | 0 1 2 | 0 1 2 | 0 1 2
        stripe     0 1 1 2 | 0 1 1 2 | 3 4 4 5 | 3 4 4 5  values: each pass takes the scales again
        beat       S 0 1 2 | S 0 1 2 | S 0 1 2 | S 0 1 2

    Scales go to the feeder as a beat that the array does not see, and count as a wait for weights.

    Ports:
        jobs: taken while no job is being walked through.
        issue: beats.
        arrived: of the DRAM buffer.
        scores_ahead: beats issued from the next cycle on come behind one more group's scores, see
            `plora.hw.rtl.core.softmax_path.SoftmaxPath`.
        ended: see `ended_layout`.
        activity: see `activity_layout`.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "jobs": In(stream.Signature(granted_layout(config))),
                "issue": Out(stream.Signature(issue_layout(config))),
                "arrived": In(position_bits(config)),
                "scores_ahead": In(1),
                "ended": Out(ended_layout),
                "activity": Out(activity_layout),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config = self._config
        issue = self.issue.payload
        active = Signal()
        job = Signal(granted_layout(config), reset_less=True)
        work = job.work
        start, fire = Signal(), Signal()
        m.d.comb += [
            self.jobs.ready.eq(~active),
            start.eq(self.jobs.valid & self.jobs.ready),
            fire.eq(self.issue.valid & self.issue.ready),
        ]
        new, new_work = self.jobs.payload, self.jobs.payload.work
        with m.If(start):
            m.d.sync += [job.eq(new), active.eq(1)]

        # Integers: what the next stripe holds, and which of the beats that share it comes next.
        scales, sub = Signal(), Signal(EXPANSION_BITS)
        beat = Signal()
        m.d.comb += beat.eq(fire & ~scales)

        # The three nested loops: what is left of each, counted down to 0.
        beats_left = Signal.like(work.beats, reset_less=True)
        pairs_left = Signal.like(work.pairs, reset_less=True)
        pair = Signal(range(SOFTMAX_PAIRS), reset_less=True)
        groups_left = Signal.like(work.groups, reset_less=True)
        first_beat, first_pair, first_group = Signal(), Signal(), Signal()
        last_beat, last_pair, last_group = Signal(), Signal(), Signal()
        end_pass, end_group, end_job = Signal(), Signal(), Signal()
        m.d.comb += [
            last_beat.eq(beats_left == 0),
            last_pair.eq(pairs_left == 0),
            last_group.eq(groups_left == 0),
            end_pass.eq(beat & last_beat),
            end_group.eq(end_pass & last_pair),
            end_job.eq(end_group & last_group),
        ]
        with m.If(start):
            m.d.sync += [
                beats_left.eq(new_work.beats - 1),
                pairs_left.eq(new_work.pairs - 1),
                groups_left.eq(new_work.groups - 1),
                pair.eq(0),
                first_beat.eq(1),
                first_pair.eq(1),
                first_group.eq(1),
            ]
        with m.Elif(beat):
            m.d.sync += [beats_left.eq(beats_left - 1), first_beat.eq(last_beat)]
            with m.If(end_pass):
                m.d.sync += [
                    beats_left.eq(work.beats - 1),
                    pairs_left.eq(Mux(last_pair, work.pairs - 1, pairs_left - 1)),
                    pair.eq(Mux(last_pair, 0, pair + 1)),
                    first_pair.eq(last_pair),
                ]
            with m.If(end_group):
                m.d.sync += [groups_left.eq(groups_left - 1), first_group.eq(0)]
            with m.If(end_job):
                m.d.sync += active.eq(0)

        # Frames: scales come before the first beat of each, of values in every pass.
        in_frame, frame_step, frame_ends = Signal(range(FRAME_SCALES)), Signal(), Signal()
        last_of_frame = Mux(work.token_wise, frame_tokens(config) // DOT_LANES - 1, FRAME_SCALES - 1)
        m.d.comb += [
            frame_step.eq(beat & (work.token_wise | (last_beat & last_pair))),
            frame_ends.eq(frame_step & ((in_frame == last_of_frame) | (work.token_wise & last_beat))),
        ]
        with m.If(start):
            m.d.sync += [in_frame.eq(0), scales.eq(new_work.expansion.any())]
        with m.Elif(frame_ends):
            m.d.sync += [in_frame.eq(0), scales.eq(work.expansion.any())]
        with m.Elif(fire):
            m.d.sync += [in_frame.eq(in_frame + frame_step), scales.eq(0)]

        # Weights: positions run on from group to group and from job to job.
        position, group_position = Signal(position_bits(config)), Signal(position_bits(config))
        group_sub = Signal(EXPANSION_BITS)
        next_position, next_sub = Signal(position_bits(config)), Signal(EXPANSION_BITS)
        stripe_ends = Signal()
        here, overtakes = Signal(), Signal()
        m.d.comb += [
            # Groups of values, and jobs, begin with a stripe of their own.
            stripe_ends.eq(scales | (sub + 1 == 1 << work.expansion) | (last_beat & (work.token_wise | last_group))),
            next_position.eq(position + stripe_ends),
            next_sub.eq(Mux(stripe_ends, 0, sub + 1)),
            # In the passes after the first, everything is there.
            here.eq(~first_pair | (position != self.arrived)),
            issue.control.weights_position.eq(position),
            # The first pass alone loads the scales of keys.
            issue.control.weights_last_use.eq(stripe_ends & (last_pair | (scales & ~work.token_wise))),
            issue.control.weights_read.eq(scales | first_beat | (sub == 0)),
            issue.control.scales.eq(scales),
            issue.control.scales_step.eq(frame_step),
            issue.control.expansion.eq(work.expansion),
            issue.control.sub.eq(sub),
            self.issue.valid.eq(active & here & ~overtakes),
        ]
        with m.If(fire):
            m.d.sync += [position.eq(next_position), sub.eq(next_sub)]
            with m.If(end_group | (scales & ~work.token_wise)):
                m.d.sync += [group_position.eq(next_position), group_sub.eq(next_sub)]
            with m.Elif(end_pass):
                m.d.sync += [position.eq(group_position), sub.eq(group_sub)]

        scores = Signal(SCORES_BITS)
        score_begins = Signal()
        m.d.comb += [
            score_begins.eq(fire & issue.control.last & work.softmax),
            overtakes.eq(issue.control.last & ~work.softmax & (scores != 0)),
        ]
        m.d.sync += scores.eq(scores + score_begins - self.scores_ahead)

        # Operand: word ``t * parts + g`` of the row for part g; kept rows are read word by word, or half by half.
        parts = Signal(range(config.channels + 1))
        part = Signal.like(issue.control.part, reset_less=True)
        address, pair_address = (Signal.like(issue.input_address, reset_less=True) for _ in range(2))
        kept_word, kept_pair = (Signal(kept_word_bits(config), reset_less=True) for _ in range(2))
        upper_half = Signal()
        last_part = Signal()
        m.d.comb += [
            parts.eq(1 << work.split_log2),
            last_part.eq(part + parts == config.channels),
            issue.input_address.eq(address),
            issue.input_enable.eq(~work.from_kept & (part == 0) & ~scales),
            issue.kept_address.eq(kept_word),
            issue.kept_enable.eq(work.from_kept & ~upper_half & ~scales),
            issue.state_pair.eq(Cat(pair, work.bank)),
            issue.state_enable.eq(work.token_wise & first_beat & ~scales),
        ]
        with m.If(start):
            m.d.sync += [
                part.eq(0),
                address.eq(new.operand_base),
                pair_address.eq(new.operand_base),
                kept_word.eq(_first_kept_word(new_work)),
                kept_pair.eq(_first_kept_word(new_work)),
                upper_half.eq(0),
            ]
        with m.Elif(beat):
            m.d.sync += [
                part.eq(Mux(last_part | last_beat, 0, part + parts)),
                address.eq(address + last_part),
                kept_word.eq(kept_word + (~work.token_wise | upper_half)),
                upper_half.eq(work.token_wise & ~upper_half & ~last_beat),
            ]
            with m.If(end_group):
                m.d.sync += [
                    address.eq(job.operand_base),
                    pair_address.eq(job.operand_base),
                    kept_word.eq(_first_kept_word(work)),
                    kept_pair.eq(_first_kept_word(work)),
                ]
            with m.Elif(end_pass):
                m.d.sync += [
                    address.eq(pair_address + work.row_stripes),
                    pair_address.eq(pair_address + work.row_stripes),
                    kept_word.eq(kept_pair + work.kept_stride),
                    kept_pair.eq(kept_pair + work.kept_stride),
                ]

        # Results: value n of pair p lies ``n`` values from the start of the pair's row.
        row = Signal(result_address_bits(config), reset_less=True)
        value = Signal(result_address_bits(config) + LANE_BITS, reset_less=True)
        with m.If(start):
            m.d.sync += [row.eq(_first_row_word(new)), value.eq(0)]
        with m.Elif(end_group):
            m.d.sync += [row.eq(_first_row_word(job)), value.eq(value + work.group_rows)]
        with m.Elif(end_pass):
            m.d.sync += row.eq(row + Mux(job.region == Region.KEPT, work.kept_stride, work.row_words))

        control = issue.control
        tag = data.View(result_tag_layout(config), control.tag)
        m.d.comb += [
            tag.region.eq(job.region),
            tag.word.eq(row + value[LANE_BITS:]),
            tag.lane.eq(value[:LANE_BITS]),
            tag.rows.eq(Mux(last_group, work.last_rows, work.group_rows)),
            tag.split_log2.eq(work.split_log2),
            tag.state.eq(Cat(pair, work.bank)),
            tag.softmax.eq(work.softmax),
            tag.begins.eq(work.begins & first_group),
            tag.scale.eq(work.scale),
            tag.bf16.eq(control.bf16),
            tag.exponent.eq(work.exponents.kept),
            tag.anchor.eq(work.token_wise & last_group),
            tag.end.eq(last_pair & last_group),
            control.from_kept.eq(work.from_kept),
            control.part.eq(part),
            control.partial.eq(last_beat),
            control.tail.eq(work.tail),
            control.tap.eq(work.tap),
            control.split_log2.eq(work.split_log2),
            control.token_wise.eq(work.token_wise),
            # Scores are no results: the softmax unit's are FP16.
            control.bf16.eq(work.bf16 & ~work.softmax),
            control.from_bf16.eq(work.bf16),
            control.exponent.eq(work.exponents.operand + work.exponents.device),
            control.upper_half.eq(upper_half),
            control.first.eq(first_beat & ~work.continues),
            control.last.eq(last_beat & ~scales & (work.destination != Destination.ACCUMULATORS)),
            control.second_row.eq(~(last_pair & work.single)),
        ]
        with m.If(work.token_wise):
            m.d.comb += control.pause.eq(Mux(last_group, DOTS_PER_WORD, DOTS_PER_WORD - 1))
        with m.Elif(work.softmax):
            m.d.comb += control.pause.eq(PE_ROWS - 1)

        # Time, from the first beat to the last.
        begun = Signal()
        cycles = Signal(CYCLES_BITS)
        activity = self.activity
        m.d.comb += [
            activity.beat.eq(beat),
            activity.span.eq(fire | begun),
            activity.stall_weights.eq((begun & ~here) | (fire & scales)),
            activity.stall_drain.eq(begun & here & ~fire),
            self.ended.valid.eq(end_job),
            self.ended.slot.eq(job.slot),
            self.ended.region.eq(job.region),
            self.ended.cycles.eq(cycles + 1),
        ]
        with m.If(end_job):
            m.d.sync += [begun.eq(0), cycles.eq(0)]
        with m.Elif(activity.span):
            m.d.sync += [begun.eq(1), cycles.eq(cycles + 1)]
        return m


def _first_kept_word(work: data.View) -> Value:
    """First word that the job takes of the first pair of kept rows."""
    return Mux(work.token_wise, work.kept_word, 0)


def _first_row_word(job: data.View) -> Value:
    """First word of the region that the job's results go to: appended columns follow those that were kept."""
    return Mux(job.region == Region.KEPT, job.work.kept_word, 0)
