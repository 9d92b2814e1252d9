"""Deliberate faults in the core's sources: each must be seen by a test of this folder, or that test is blind."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from plora.hw.defs.config import PRESETS
from plora.hw.defs.descriptor import DType
from tests.hw.rtl.core import (
    test_buffers,
    test_bursts,
    test_channel_reader,
    test_decoder,
    test_expander,
    test_feeder,
    test_loaders,
    test_results,
    test_sequencer,
    test_softmax_path,
)
from tests.hw.rtl.core.bench import TINY
from tests.hw.rtl.pe import test_array


class Fault(NamedTuple):
    """A change of one line of ``unit``'s module (of the core, unless it says of what), and what must fail of it."""

    unit: str
    component: str
    right: str
    wrong: str
    tests: types.ModuleType
    run: Callable[[], Any]


def beats_of_some_jobs() -> None:
    """A few examples of the sequencer's beats, nothing in their way."""
    for seed in range(9):
        inner(test_sequencer.test_beats_come_group_by_group_pair_by_pair)(TINY, (0.0, 1.0), seed)


def beats_of_many_jobs() -> None:
    """More of them, for what few jobs show."""
    for seed in range(40):
        inner(test_sequencer.test_beats_come_group_by_group_pair_by_pair)(TINY, (0.0, 1.0), seed)


def inner(test: Any) -> Any:
    """The function behind a hypothesis test: one example, no shrinking."""
    return test.hypothesis.inner_test


FAULTS = {
    "a burst one word over the page": Fault(
        "bursts", "BurstCutter", "limits = [PAGE_WORDS - ", "limits = [PAGE_WORDS + 1 - ", test_bursts,
        lambda: inner(test_bursts.test_bursts_cover_the_runs_within_pages_groups_and_room)([(60, 80, 0)], 64, 0.0, 0),
    ),
    "a burst across the end of a held group": Fault(
        "bursts", "BurstCutter", "Mux(group == 0, self._max_words, group_left)", "self._max_words", test_bursts,
        lambda: inner(test_bursts.test_bursts_cover_the_runs_within_pages_groups_and_room)([(0, 60, 9)], 8, 0.0, 0),
    ),
    "room in the DRAM buffer not counted when asked for": Fault(
        "weight_reader", "WeightReader", "free - asked + self.freed", "free + self.freed", test_loaders,
        lambda: inner(test_loaders.test_weights_are_asked_for_in_order_and_never_beyond_the_dram_buffer)(3),
    ),
    "an operand's ring space never given back": Fault(
        "operand_loader", "OperandLoader", "free + self.freed - ", "free - ", test_loaders,
        lambda: inner(
            test_loaders.test_operands_get_successive_places_in_the_ring_and_sharers_that_of_the_last
        )(0.0, 1),
    ),
    "the last word of a burst taken for the next burst's": Fault(
        "channel_reader", "ChannelReader", "index == expected.length", "index + 1 == expected.length",
        test_channel_reader,
        lambda: test_channel_reader.test_words_carry_the_label_of_their_burst(0.0),
    ),
    "a stripe that counts once any channel brought it": Fault(
        "rendezvous", "Rendezvous", "for count in self.counts).all()", "for count in self.counts).any()", test_buffers,
        lambda: inner(test_buffers.test_rendezvous_counts_what_the_slowest_channel_has_seen)(3, 1),
    ),
    "lanes beyond K multiplied": Fault(
        "feeder", "BeatFeeder", "lane < lanes_left", "lane <= lanes_left", test_feeder,
        lambda: test_feeder.test_channels_get_the_words_of_their_part_and_lanes_beyond_k_are_masked(TINY, 0.0),
    ),
    "a beat before its weights": Fault(
        "sequencer", "BeatSequencer", "here.eq(~first_pair | (position != self.arrived))", "here.eq(1)", test_sequencer,
        lambda: inner(test_sequencer.test_beats_come_group_by_group_pair_by_pair)(TINY, (0.0, 0.4), 1),
    ),
    "stale sums under a new job": Fault(
        "sequencer", "BeatSequencer", "first_beat & ~work.continues", "first_beat & first_pair", test_sequencer,
        lambda: inner(test_sequencer.test_beats_come_group_by_group_pair_by_pair)(TINY, (0.0, 1.0), 1),
    ),
    "a stripe of integers given back with its first beat": Fault(
        "sequencer", "BeatSequencer", "stripe_ends & (last_pair | (scales & ~work.token_wise))",
        "last_pair | (scales & ~work.token_wise)", test_sequencer, beats_of_some_jobs,
    ),
    "scales of keys read in every pass": Fault(
        "sequencer", "BeatSequencer", "with m.If(end_group | (scales & ~work.token_wise)):", "with m.If(end_group):",
        test_sequencer, beats_of_some_jobs,
    ),
    "a group of values that begins within a stripe": Fault(
        "sequencer", "BeatSequencer", "(last_beat & (work.token_wise | last_group))", "(last_beat & last_group)",
        test_sequencer, beats_of_many_jobs,
    ),
    "weights of the beat behind softmax terms not read": Fault(
        "feeder", "BeatFeeder", "~shown.token_wise & busy.any() & ~still_scaled & shown.weights_read", "0", test_feeder,
        lambda: test_feeder.test_channels_get_the_words_of_their_part_and_lanes_beyond_k_are_masked(TINY, 0.0),
    ),
    "scales that lag behind a row group": Fault(
        "expander", "WordExpander", "waiting >> SCALE_BITS)", "waiting)", test_expander,
        lambda: test_expander.test_random_words_of_keys_and_values(2),
    ),
    "the sign of an integer lost": Fault(
        "expander", "WordExpander", "unit.negative.eq(lanes[lane][-1])", "unit.negative.eq(0)", test_expander,
        lambda: test_expander.test_every_integer_at_every_scale(DType.INT4),
    ),
    "a kept operand read before it is stored": Fault(
        "gate", "JobGate", "(incomplete[work.bank] == 0) & ", "", test_sequencer,
        test_sequencer.test_a_kept_operand_must_be_stored_to_its_last_value,
    ),
    "values beyond N stored": Fault(
        "collector", "ResultCollector", "eq((exists << lane)", "eq((C(~0, 16) << lane)", test_results,
        lambda: test_results.test_the_collector_stores_each_value_of_a_job_once_and_nothing_beyond_n(TINY),
    ),
    "a row's tail not zero": Fault(
        "result_writer", "ResultWriter", "(values <= lane)", "(values < lane)", test_results,
        lambda: inner(test_results.test_rows_are_written_line_after_line_with_zero_tails)(0.0, 0, 1),
    ),
    "an account settled by the other's acknowledgements": Fault(
        "result_writer", "ResultWriter", "self.write.ack & (self.write.ack_tag == account)", "self.write.ack",
        test_results, lambda: test_results.test_an_account_is_settled_by_its_own_acknowledgements_alone(1),
    ),
    "completion before the last acknowledgement": Fault(
        "retirement", "Retirement", "waiting & (~settling.written | ", "waiting & (1 | ", test_results,
        lambda: [inner(test_results.test_outcomes_are_those_of_the_table)(seed) for seed in range(4)],
    ),
    "a chain goes on before its failure is known": Fault(
        "retirement", "Retirement", "(record.first | ~waiting)", "(record.first | 1)", test_results,
        lambda: [
            test_results.test_a_failure_aborts_the_rest_of_its_chain_and_nothing_else(
                test_results.Retired(test_results.FAILED, write_error=1, flags={"chain": 1}), seed
            )
            for seed in range(4)
        ],
    ),
    "the two dot units of a token-wise beat swapped": Fault(
        "pe.array", "PeArray", "* DOTS_PER_WORD * channels + d * channels + c",
        "* DOTS_PER_WORD * channels + (1 - d) * channels + c", test_array,
        lambda: test_array.test_amaranth_simulator_agrees("tiny"),
    ),
    "the second dot unit's sums lost": Fault(
        "pe.array", "PeArray", "held.eq(complete.token_wise)", "held.eq(0)", test_array,
        lambda: test_array.test_amaranth_simulator_agrees("tiny"),
    ),
    "softmax terms left under the anchors of their time": Fault(
        "feeder", "BeatFeeder", "Mux(control.token_wise, scaled, self.kept[row])", "self.kept[row]", test_feeder,
        lambda: test_feeder.test_channels_get_the_words_of_their_part_and_lanes_beyond_k_are_masked(TINY, 0.0),
    ),
    "softmax terms brought to a wrong anchor": Fault(
        "feeder", "BeatFeeder", "scaler.last.eq(state.anchor)", "scaler.last.eq(0)", test_feeder,
        lambda: test_feeder.test_channels_get_the_words_of_their_part_and_lanes_beyond_k_are_masked(TINY, 0.0),
    ),
    "a beat that overtakes those whose terms are being scaled": Fault(
        "feeder", "BeatFeeder", "advance & ~busy.any())),", "advance)),", test_feeder,
        lambda: test_feeder.test_channels_get_the_words_of_their_part_and_lanes_beyond_k_are_masked(TINY, 0.0),
    ),
    "a pass that begins with the upper half of its first word": Fault(
        "sequencer", "BeatSequencer", "~upper_half & ~last_beat", "~upper_half", test_sequencer,
        beats_of_some_jobs,
    ),
    "results that overtake scores": Fault(
        "sequencer", "BeatSequencer", "~work.softmax & (scores != 0)", "0", test_sequencer,
        beats_of_some_jobs,
    ),
    "V weighed before the rows' states are complete": Fault(
        "gate", "JobGate", "~(work.token_wise & self.softmax_busy.bit_select(work.bank, 1))", "1", test_sequencer,
        test_sequencer.test_softmax_terms_are_weighed_only_when_the_states_of_their_rows_are_complete,
    ),
    "V that waits for the states of the other bank": Fault(
        "gate", "JobGate", "self.softmax_busy.bit_select(work.bank, 1)", "self.softmax_busy.any()", test_sequencer,
        test_sequencer.test_softmax_terms_are_weighed_only_when_the_states_of_their_rows_are_complete,
    ),
    "terms of one bank counted with those of the other": Fault(
        "gate", "JobGate", "(work.destination == Destination.KEPT) & (work.bank == bank)",
        "(work.destination == Destination.KEPT) & (bank == 0)", test_sequencer,
        lambda: inner(
            test_sequencer.test_terms_of_a_bank_are_taken_once_the_jobs_up_to_the_last_that_made_them_are_collected
        )(1),
    ),
    "terms taken a job too soon": Fault(
        "gate", "JobGate", "left.eq(still + 1)", "left.eq(still)", test_sequencer,
        lambda: inner(
            test_sequencer.test_terms_of_a_bank_are_taken_once_the_jobs_up_to_the_last_that_made_them_are_collected
        )(1),
    ),
    "the banks of two heads not kept apart": Fault(
        "decoder", "Decoder", "newest ^ (begins_terms | previous)", "newest ^ begins_terms", test_decoder,
        lambda: test_decoder.test_banks_of_softmax_terms_take_turns(PRESETS["tiny"]),
    ),
    "previous terms that outlive a plain intermediate": Fault(
        "decoder", "Decoder", "with m.If((d.op == Op.SOFTMAX) & chain.kept_softmax)", "with m.If(chain.kept_softmax)",
        test_decoder,
        lambda: test_decoder.test_banks_of_softmax_terms_take_turns(PRESETS["tiny"]),
    ),
    "results let through a cycle before the scores are gone": Fault(
        "softmax_path", "SoftmaxPath", "wait = max(0, self.LATENCY - self._approach)",
        "wait = max(0, self.LATENCY - self._approach - 1)", test_softmax_path,
        lambda: test_softmax_path.test_scores_become_what_the_golden_softmax_makes_of_them(2, 1),
    ),
    "the second row's scores under the first row's number": Fault(
        "softmax_path", "SoftmaxPath", "unit[row].row.eq(Cat(C(row, 1), tag.state))",
        "unit[row].row.eq(tag.state << 1)",
        test_softmax_path,
        lambda: test_softmax_path.test_scores_become_what_the_golden_softmax_makes_of_them(2, 1),
    ),
    "a chain that goes on with the anchors of the one before": Fault(
        "softmax_path", "SoftmaxPath", "tag.begins & (results.tap_index == 0)", "0", test_softmax_path,
        lambda: test_softmax_path.test_scores_become_what_the_golden_softmax_makes_of_them(2, 1),
    ),
    "an anchor over a row's last values": Fault(
        "collector", "ResultCollector", "write.word.eq(write.word + 1)", "write.word.eq(write.word)", test_results,
        lambda: test_results.test_the_word_after_a_row_of_a_token_wise_job_is_its_anchor(TINY, 1),
    ),
    "stripes between groups read": Fault(
        "bursts", "BurstCutter", "address.eq(address + skip)", "address.eq(address)", test_bursts,
        lambda: inner(test_bursts.test_words_between_groups_are_left_out)([(9, 3, 4)], 8, 0),
    ),
    "an operand that ends where its window ends refused": Fault(
        "decoder", "Decoder", "(g.room[:ADDRESS_BITS] < d.device_bytes)", "(g.room[:ADDRESS_BITS] <= d.device_bytes)",
        test_decoder,
        lambda: test_decoder.test_status_and_work_equal_the_specification(PRESETS["tiny"], 200),
    ),
}  # fmt: skip


def faulty_component(fault: Fault) -> Any:
    """Return the component from a copy of its module that has the fault."""
    original = importlib.import_module(f"plora.hw.rtl.{fault.unit if '.' in fault.unit else f'core.{fault.unit}'}")
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    assert source.count(fault.right) == 1, f"{fault.unit}.py holds {fault.right!r} {source.count(fault.right)} times"
    module = types.ModuleType(original.__name__)
    exec(compile(source.replace(fault.right, fault.wrong), f"faulty {fault.unit}.py", "exec"), module.__dict__)
    return getattr(module, fault.component)


@pytest.mark.parametrize("name", FAULTS)
def test_a_deliberate_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.run()  # it passes as it should
    monkeypatch.setattr(fault.tests, fault.component, faulty_component(fault))
    with pytest.raises(AssertionError):
        fault.run()
