// What the walk needs to know of the device and its memory. Filled in by kernel.py from the configuration,
// sim/core/data/core.toml and the memory's timing; mirrored there field by field.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

constexpr double kUnknown = std::numeric_limits<double>::infinity();  // a cycle that is not known yet, or never comes

struct Settings {
    // Configuration.
    int64_t channels, instruction_buffer_depth, dram_buffer_stripes, input_buffer_stripes;
    // core.toml: numbers of entries,
    int64_t job_slots, records, finished, request_queue, bursts_in_flight, page_words, burst_share, slot_reads;
    int64_t completion_writes, backoff_log2;
    // and cycles.
    double instruction_buffer, decode, burst_cut, burst_skip, burst_request, rendezvous, grant, array, collect, queue;
    double retire, write_start, line_queue, write_end, read_return, write_return, engine_job, slot_arrived, acknowledged;
    // Memory: latencies and word interval in cycles, expected waits where it is not always ready.
    double read_latency, write_latency, beat_cycles;
    double wait_one;     // for one side to be ready
    double wait_pair;    // for both of two sides, each in its own cycle
    double wait_mean;    // for one side, per event of a long stream
    double wait_spread;  // the slowest channel's further wait, per square root of an event
    const double* waits; // of the slowest channel in n events, n = 0 ... waits_known
    int64_t waits_known;
    // Registers as they are after reset.
    int64_t share;
    double poll_interval, chain_timeout;
};

// What a descriptor asks of the core; mirrors plora.sim.core.demand.Demand.
struct Demand {
    int64_t load, from_kept, from_previous, operand_stripes, operand_space, operand_stripe, device_stripe;
    int64_t stripes, beats, groups, pairs;
    int64_t beat_cycles, merge_cycles, destination, lines, result_line, multiply_adds, split_log2;
    int64_t begins_terms, softmax_cycles, settle_cycles, expansion_log2, group_stripes, frame_beats, frames;
    int64_t rescale_cycles, anchor_cycles, skip;
};

enum Destination : int64_t { kMemory = 0, kKept = 1, kAccumulators = 2 };
