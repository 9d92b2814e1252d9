// PeBench of bench.py behind C functions that move whole arrays of stimuli and responses.
#include <cstdint>
#include <cstring>

#include "Vndp.h"
#include "verilated.h"

void vl_stop(const char*, int, const char*) {}
void vl_fatal(const char*, int, const char*, const char*) {}

namespace {

struct Bench {
    VerilatedContext context;
    Vndp dut{&context, ""};
    uint64_t noise = 0x9E3779B97F4A7C15ull;

    Bench() {
        dut.rst = 1;
        tick();
        dut.rst = 0;
    }

    void tick() {
        dut.clk = 0;
        dut.eval();
        dut.clk = 1;
        dut.eval();
    }

    // Marsaglia's xorshift: what ports carry that must not matter.
    uint32_t scramble() {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        return static_cast<uint32_t>(noise >> 16);
    }
};

// Wide ports are arrays of 32-bit words, narrow ones plain integers.
template <std::size_t N>
void load(VlWide<N>& port, const uint32_t* words) { std::memcpy(port.data(), words, 4 * N); }
template <std::size_t N>
void store(const VlWide<N>& port, uint32_t* words) { std::memcpy(words, port.data(), 4 * N); }
void store(const QData& port, uint32_t* words) { std::memcpy(words, &port, sizeof port); }
template <std::size_t N>
void scramble(Bench& bench, VlWide<N>& port) { for (std::size_t i = 0; i < N; ++i) port.data()[i] = bench.scramble(); }

// Drives one array. Beats are offered in order, each after its gap of cycles without one, in which
// the payload is noise. Returns the number of results, or -1 if some beat was never accepted.
template <typename Beat, typename Result>
int64_t run_array(Bench& bench, Beat& beat, CData& valid, CData& ready, Result& result, CData& result_valid,
                  int64_t beats, const uint32_t* payloads, const int32_t* gaps, int64_t drain_cycles,
                  int64_t* accepted, int64_t room, uint32_t* results, int64_t* result_cycles) {
    const std::size_t beat_words = sizeof(Beat) / 4, result_words = sizeof(Result) / 4;
    int64_t count = 0, cycle = 0, next = 0, gap = beats ? gaps[0] : 0, refused = 0, idle = 0;
    while (next < beats || idle < drain_cycles) {
        bool offer = next < beats && gap == 0;
        valid = offer;
        if (offer)
            load(beat, payloads + next * beat_words);
        else
            scramble(bench, beat);
        bench.dut.clk = 0;
        bench.dut.eval();
        if (result_valid) {
            if (count < room) {
                store(result, results + count * result_words);
                result_cycles[count] = cycle;
            }
            ++count;
        }
        if (offer && ready) {
            accepted[next++] = cycle;
            gap = next < beats ? gaps[next] : 0;
            refused = 0;
        } else if (offer) {
            if (++refused > 1000) return -1;
        } else if (next < beats) {
            --gap;
        } else {
            ++idle;
        }
        bench.dut.clk = 1;
        bench.dut.eval();
        ++cycle;
    }
    valid = 0;
    return count;
}

}  // namespace

extern "C" {

void* pe_open() { return new Bench; }
void pe_close(void* handle) { delete static_cast<Bench*>(handle); }

// One set of operands a cycle; sums[i] is the port `latency` cycles after operands i.
int64_t pe_dot(void* handle, int64_t count, int64_t latency, const uint16_t* a, const uint16_t* b, const uint16_t* enable,
               const uint8_t* first, uint32_t* sums) {
    Bench& bench = *static_cast<Bench*>(handle);
    Vndp& dut = bench.dut;
    const std::size_t words = sizeof(dut.dot_sum) / 4;
    for (int64_t i = 0; i < count + latency; ++i) {
        if (i < count) {
            load(dut.dot_a, reinterpret_cast<const uint32_t*>(a + 16 * i));
            load(dut.dot_b, reinterpret_cast<const uint32_t*>(b + 16 * i));
            dut.dot_enable = enable[i];
            dut.dot_first = first[i];
        } else {
            scramble(bench, dut.dot_a);
            scramble(bench, dut.dot_b);
            dut.dot_enable = 0;
            dut.dot_first = 0;
        }
        bench.tick();
        if (i >= latency - 1 && i - (latency - 1) < count) store(dut.dot_sum, sums + (i - (latency - 1)) * words);
    }
    return count;
}

// One word after the other, all with the same settings; passes within the cycle.
int64_t pe_convert(void* handle, int64_t words, int64_t bf16, int64_t exponent, const uint32_t* data, uint32_t* converted) {
    Vndp& dut = static_cast<Bench*>(handle)->dut;
    dut.converter_bf16 = bf16;
    dut.converter_exponent = exponent & 255;
    for (int64_t i = 0; i < words; ++i) {
        load(dut.converter_data, data + 16 * i);
        dut.eval();
        store(dut.converter_converted, converted + 16 * i);
    }
    return words;
}

// One sum a cycle; format bit 0: round to BF16, bit 1: from BF16. The results at i are those of the ports `latency` cycles after sum i.
int64_t pe_drain(void* handle, int64_t count, int64_t latency, const uint32_t* sums, const uint8_t* offsets,
                 const uint8_t* formats, const int16_t* scales, uint16_t* values, uint8_t* numeric, uint32_t* scores, uint8_t* score_numeric) {
    Bench& bench = *static_cast<Bench*>(handle);
    Vndp& dut = bench.dut;
    const std::size_t words = sizeof(dut.drain_sum) / 4;
    for (int64_t i = 0; i < count + latency - 1; ++i) {
        if (i < count) {
            load(dut.drain_sum, sums + i * words);
            dut.drain_offset = offsets[i];
            dut.drain_bf16 = formats[i] & 1;
            dut.drain_from_bf16 = formats[i] >> 1 & 1;
            dut.drain_scale = scales[i] & 511;
        } else {
            scramble(bench, dut.drain_sum);
            dut.drain_offset = bench.scramble() & 15;
            dut.drain_bf16 = bench.scramble() & 1;
            dut.drain_from_bf16 = bench.scramble() & 1;
            dut.drain_scale = bench.scramble() & 511;
        }
        bench.tick();
        if (i >= latency - 1) {
            values[i - (latency - 1)] = dut.drain_value;
            numeric[i - (latency - 1)] = dut.drain_numeric;
            scores[i - (latency - 1)] = dut.drain_score;
            score_numeric[i - (latency - 1)] = dut.drain_score_numeric;
        }
    }
    return count;
}

#define PE_ARRAY(NAME)                                                                                              \
    int64_t pe_array_##NAME(void* handle, int64_t beats, const uint32_t* payloads, const int32_t* gaps,             \
                            int64_t drain_cycles, int64_t* accepted, int64_t room, uint32_t* results,               \
                            int64_t* result_cycles) {                                                               \
        Bench& bench = *static_cast<Bench*>(handle);                                                                \
        Vndp& dut = bench.dut;                                                                                      \
        return run_array(bench, dut.NAME##_beat, dut.NAME##_valid, dut.NAME##_ready, dut.NAME##_result,             \
                         dut.NAME##_result_valid, beats, payloads, gaps, drain_cycles, accepted, room, results,     \
                         result_cycles);                                                                            \
    }

PE_ARRAY(one)
PE_ARRAY(tiny)

}  // extern "C"
