// The walk as a C interface for ctypes.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine.h"

extern "C" {

void* plora_create(const Settings* settings) { return new Engine(*settings); }
void plora_destroy(void* self) { delete static_cast<Engine*>(self); }

void plora_enable(void* self, int64_t index, int64_t depth, int64_t submission_line, int64_t submission_lines,
                  int64_t result_line, int64_t result_lines, int64_t weight, int32_t interrupts, double cycle) {
    std::unique_ptr<Ring> ring(
        new Ring{index, depth, submission_line, submission_lines, result_line, result_lines, weight, interrupts != 0});
    static_cast<Engine*>(self)->enable(std::move(ring), cycle);
}

void plora_set_registers(void* self, double poll_interval, double chain_timeout, int64_t share) {
    static_cast<Engine*>(self)->set_registers(poll_interval, chain_timeout, share);
}
void plora_disable(void* self, int64_t queue) { static_cast<Engine*>(self)->disable(queue); }
int32_t plora_busy(void* self, int64_t queue) { return static_cast<Engine*>(self)->busy(queue); }

// `count` descriptors of one queue, from number `first` on, with their demands; tags count up from `tag`.
void plora_publish(void* self, int64_t queue, int64_t first, int64_t count, double published, int64_t tag,
                   const Demand* demands, const uint8_t* chain, const uint8_t* refused) {
    Engine& engine = *static_cast<Engine*>(self);
    for (int64_t i = 0; i < count; ++i) {
        engine.publish(queue, first + i, published, tag + i);
        engine.resolve(queue, first + i, chain[i] != 0, refused[i] ? nullptr : &demands[i]);
    }
}

// A descriptor of which only the place is known; plora_advance asks for the rest when it comes to it.
void plora_publish_unresolved(void* self, int64_t queue, int64_t count, double published, int64_t tag) {
    static_cast<Engine*>(self)->publish(queue, count, published, tag);
}
void plora_resolve(void* self, int64_t queue, int64_t count, int32_t chain, const Demand* demand) {
    static_cast<Engine*>(self)->resolve(queue, count, chain != 0, demand);
}

void plora_doorbell(void* self, int64_t queue, double cycle) { static_cast<Engine*>(self)->ring_doorbell(queue, cycle); }
void plora_take(void* self, int64_t queue, int64_t head, double cycle) {
    static_cast<Engine*>(self)->take(queue, head, cycle);
}
double plora_load_line(void* self, int64_t line, double cycle) { return static_cast<Engine*>(self)->load_line(line, cycle); }
double plora_store_line(void* self, int64_t line, double cycle) {
    return static_cast<Engine*>(self)->store_line(line, cycle);
}

// Returns the cycle of the next thing known to happen. `unresolved` gets queue, count and tag of the descriptor that
// it waits for and whether its chain was closed before it came, or a queue of -1.
double plora_advance(void* self, double present, int64_t* unresolved) {
    Engine& engine = *static_cast<Engine*>(self);
    const double next = engine.advance(present);
    unresolved[0] = -1;
    if (engine.unresolved) {
        unresolved[0] = engine.unresolved->ring->index;
        unresolved[1] = engine.unresolved_count;
        unresolved[2] = engine.unresolved->tag;
        unresolved[3] = engine.unresolved->ring->broken;
    }
    return next;
}

// Moves up to `room` completions to `out`, oldest first; returns their number.
int64_t plora_completions(void* self, Completion* out, int64_t room) {
    auto& queue = static_cast<Engine*>(self)->completions;
    const int64_t count = std::min<int64_t>(room, static_cast<int64_t>(queue.size()));
    std::copy_n(queue.begin(), count, out);
    queue.erase(queue.begin(), queue.begin() + count);
    return count;
}

int64_t plora_interrupts(void* self, Signal* out, int64_t room) {
    auto& queue = static_cast<Engine*>(self)->interrupts;
    const int64_t count = std::min<int64_t>(room, static_cast<int64_t>(queue.size()));
    std::copy_n(queue.begin(), count, out);
    queue.erase(queue.begin(), queue.begin() + count);
    return count;
}

int64_t plora_words_read(void* self) { return static_cast<Engine*>(self)->channels().words_read; }
int64_t plora_words_written(void* self) { return static_cast<Engine*>(self)->channels().words_written; }

}  // extern "C"
