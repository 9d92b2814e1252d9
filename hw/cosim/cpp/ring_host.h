// Hosts that drive many rings at once, compiled: for millions of descriptors.
//
// Submission lines are put straight into memory, each in one piece (as a 64-byte store of the link lands),
// and completions are read there; doorbells and CQ_HEAD go over s_io, one register at a time, at random moments.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "common.h"
#include "io_port.h"

constexpr unsigned kDescriptorBytes = 26, kPackedBytes = 32, kCompletionEcho = 16, kValidOffset = 60;

// One queue, enabled already. Mirrored in rings.py (class _Ring).
struct Ring {
    uint64_t submission_base, result_base;
    uint32_t queue, depth, submission_log2, result_log2;
    uint32_t valid;                // valid word of the first pass
    uint32_t doorbell, head;       // MMIO offsets
    uint32_t reserved;
    uint64_t count;
    const uint8_t* descriptors;    // kPackedBytes each
    uint8_t* statuses;             // one byte each, written as completions come
    uint64_t completed;            // written
    uint64_t longest_wait_cycles;  // written: from the landing of a descriptor to its completion
};

// A register write at a random moment. Mirrored in rings.py (class _Poke).
struct Poke {
    uint32_t offset, value;
};

class RingHost {
  public:
    RingHost(std::vector<Ring*> rings, const Poke* pokes, uint64_t poke_count, const Settings& settings, IoPort& io,
             Faults& faults, uint64_t seed)
        : rings_(std::move(rings)), pokes_(pokes), poke_count_(poke_count), settings_(settings), io_(io),
          faults_(faults), random_(seed) {
        for (Ring* ring : rings_) {
            ring->completed = ring->longest_wait_cycles = 0;
            states_.emplace_back();
            states_.back().landed.resize(ring->depth);
        }
    }

    bool done() const {
        for (const Ring* ring : rings_)
            if (ring->completed < ring->count) return false;
        return io_.done();
    }

    // Once a cycle, before the device's.
    void act(uint64_t cycle) {
        for (size_t i = 0; i < rings_.size(); ++i) {
            while (take(*rings_[i], states_[i], cycle)) last_progress_ = cycle;
            if (!random_.chance(kPause)) submit(*rings_[i], states_[i], cycle);
        }
        if (io_.done()) write_a_register();
        if (cycle > last_progress_ + settings_.timeout_cycles) complain(cycle);
    }

    void begin(uint64_t cycle) { last_progress_ = cycle; }

  private:
    struct State {
        uint64_t submitted = 0, told = 0;
        bool rings = false;
        std::vector<uint64_t> landed;  // cycle, by slot
    };

    static uint32_t valid_word(const Ring& ring, uint64_t number) {
        return (ring.valid & 0xFF000000u) | ((ring.valid + static_cast<uint32_t>(number / ring.depth)) & 0x00FFFFFFu);
    }

    bool take(Ring& ring, State& state, uint64_t cycle) {
        if (ring.completed >= state.submitted) return false;
        const uint64_t slot = ring.completed % ring.depth;
        const uint8_t* line = settings_.memory + ring.result_base + (slot << ring.result_log2);
        uint32_t word;
        std::memcpy(&word, line + kValidOffset, sizeof word);
        if (word != valid_word(ring, ring.completed)) return false;
        const uint8_t* sent = ring.descriptors + ring.completed * kPackedBytes;
        if (std::memcmp(line + kCompletionEcho, sent, kDescriptorBytes))
            faults_.raise(cycle, "queue %u: completion %llu is not that of its descriptor", ring.queue,
                          static_cast<unsigned long long>(ring.completed));
        ring.statuses[ring.completed] = line[0];
        ring.longest_wait_cycles = std::max(ring.longest_wait_cycles, cycle - state.landed[slot]);
        ++ring.completed;
        return true;
    }

    void submit(Ring& ring, State& state, uint64_t cycle) {
        for (unsigned burst = 0; burst < kBurst; ++burst) {
            if (state.submitted >= ring.count || state.submitted - ring.completed >= ring.depth) return;
            const uint64_t slot = state.submitted % ring.depth;
            uint8_t* line = settings_.memory + ring.submission_base + (slot << ring.submission_log2);
            const uint32_t word = valid_word(ring, state.submitted);
            std::memcpy(line, ring.descriptors + state.submitted * kPackedBytes, kPackedBytes);
            std::memcpy(line + kValidOffset, &word, sizeof word);
            state.landed[slot] = cycle;
            ++state.submitted;
            state.rings = true;
        }
    }

    void write_a_register() {
        if (next_poke_ < poke_count_ && random_.chance(kPoke)) {
            io_.write(static_cast<uint16_t>(pokes_[next_poke_].offset), pokes_[next_poke_].value);
            ++next_poke_;
            return;
        }
        turn_ = (turn_ + 1) % rings_.size();
        Ring& ring = *rings_[turn_];
        State& state = states_[turn_];
        // The head is told late: of half a ring, or when nothing else moves.
        if (ring.completed - state.told > ring.depth / 2 || (ring.completed != state.told && random_.chance(kHead))) {
            state.told = ring.completed;
            io_.write(static_cast<uint16_t>(ring.head), static_cast<uint32_t>(state.told & 0xFFFF));
        } else if (state.rings && random_.chance(kDoorbell)) {
            state.rings = false;
            io_.write(static_cast<uint16_t>(ring.doorbell), random_.next());
        }
    }

    void complain(uint64_t cycle) {
        std::string text;
        for (size_t i = 0; i < rings_.size(); ++i)
            text += " queue " + std::to_string(rings_[i]->queue) + ": " + std::to_string(rings_[i]->completed) + " of " +
                    std::to_string(states_[i].submitted) + " submitted are completed;";
        faults_.raise(cycle, "no completion within %u cycles:%s", settings_.timeout_cycles, text.c_str());
    }

    // Chances in 2^32.
    static constexpr uint32_t kPause = 1u << 31, kPoke = 1u << 28, kHead = 1u << 26, kDoorbell = 1u << 30;
    static constexpr unsigned kBurst = 4;

    std::vector<Ring*> rings_;
    std::vector<State> states_;
    const Poke* pokes_;
    uint64_t poke_count_, next_poke_ = 0, last_progress_ = 0;
    const Settings& settings_;
    IoPort& io_;
    Faults& faults_;
    Random random_;
    size_t turn_ = 0;
};
