// What every part of the test bench uses: randomness, the first fault, and the settings from Python.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

constexpr unsigned kLineBytes = 64;  // one beat of a 512-bit bus; the granule of channel interleaving

// Seeded, small, and the same on every machine (xorshift64*).
class Random {
  public:
    explicit Random(uint64_t seed) {
        // splitmix64: neighbouring seeds must not give neighbouring streams, and 0 must not stay 0.
        uint64_t z = seed + 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        state_ = (z ^ (z >> 31)) | 1;
    }
    uint32_t next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1Dull) >> 32);
    }
    // True with probability threshold / 2^32; costs nothing where the probability is 0.
    bool chance(uint32_t threshold) { return threshold != 0 && next() < threshold; }
    uint32_t below(uint32_t count) { return static_cast<uint32_t>((uint64_t{next()} * count) >> 32); }

  private:
    uint64_t state_;
};

// The first thing that went wrong; later ones are usually its consequences.
class Faults {
  public:
    bool any() const { return !text_.empty(); }
    const std::string& text() const { return text_; }
    void raise(uint64_t cycle, const char* format, ...) __attribute__((format(printf, 3, 4))) {
        if (any()) return;
        char buffer[512];
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(buffer, sizeof buffer, format, arguments);
        va_end(arguments);
        text_ = "cycle " + std::to_string(cycle) + ": " + buffer;
    }

  private:
    std::string text_;
};

// Remembers an offer that was not taken: AXI forbids changing or withdrawing it.
template <typename Payload>
class Stable {
  public:
    void check(bool valid, bool ready, const Payload& payload, const char* port, const char* channel, uint64_t cycle,
               Faults& faults) {
        if (waiting_) {
            if (!valid) faults.raise(cycle, "%s: %s valid was withdrawn before it was accepted", port, channel);
            else if (!(payload == kept_))
                faults.raise(cycle, "%s: %s payload changed before it was accepted", port, channel);
        }
        waiting_ = valid && !ready;
        if (waiting_) kept_ = payload;
    }
    bool waiting() const { return waiting_; }
    void reset() { waiting_ = false; }

  private:
    bool waiting_ = false;
    Payload kept_{};
};

enum ResponseOrder : uint32_t { kInOrder = 0, kReorderBursts = 1, kReorderBeats = 2 };

// Mirrored field by field in device.py (class _Settings).
struct Settings {
    uint8_t* memory;               // the device's DRAM, byte i is DPA i; owned by the caller
    uint64_t memory_bytes;
    uint64_t seed;
    uint32_t stall;                // probability of an idle cycle on each AXI channel, times 2^32
    uint32_t read_latency_cycles;  // from the acceptance of an address to its first beat, at least
    uint32_t write_latency_cycles; // from the last beat in memory to the response, at least
    uint32_t latency_jitter_cycles;
    uint32_t max_bursts;           // reads, and writes, that a channel accepts before it holds back
    uint32_t response_order;       // ResponseOrder, across ids
    uint32_t address_waits_for_data;  // hold AWREADY until write data was offered
    uint32_t host_outstanding;     // lines under way on s_mem in each direction
    uint32_t host_reorder;         // posted host writes leave in random order
    uint32_t host_delay_cycles;    // each posted host write is held back for up to so many cycles
    uint32_t timeout_cycles;       // longest wait for an answer to the host
    const char* trace_path;        // nullptr: no waves
};

// A range of DPA in which some requesters may read or write. Mirrored in device.py (class _Window).
struct Window {
    uint64_t first, end;
    uint32_t requesters;  // bit r: requester r, bits 5:4 of a transaction id
    uint32_t reads, writes;
};

// A range of DPA in which some requesters get no answers, or get them `late_cycles` later.
struct Silence {
    uint64_t first, end;
    uint32_t requesters;   // as in Window
    uint32_t late_cycles;  // 0: never
};

// What memory does beside its work, shared by all channels.
struct MemoryRules {
    std::vector<std::pair<uint64_t, uint64_t>> errors;
    std::vector<Window> windows;  // none: everything that exists may be touched
    std::vector<Silence> silences;
};


// When things happened at the ports of memory, in cycles; 0: not since the events were cleared. By requester,
// as in Window. Mirrored in library.py (class Events).
struct Events {
    uint64_t first_read_address[3];
    uint64_t first_read_beat[3], last_read_beat[3];
    uint64_t last_write_committed[3];
};

// Counted per memory channel since the last reset; mirrored in device.py (class _Counters).
struct Counters {
    uint64_t read_bursts, read_beats, write_bursts, write_beats;
};
