// SfuBench of bench.py behind C functions that move whole arrays of stimuli and responses.
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

    Bench() {
        dut.rst = 1;
        edge();
        dut.rst = 0;
    }

    void settle() {
        dut.clk = 0;
        dut.eval();
    }

    void edge() {
        settle();
        dut.clk = 1;
        dut.eval();
    }
};

// A port as so many 32-bit words, whatever type it has.
template <typename Port>
constexpr std::size_t words() { return (sizeof(Port) + 3) / 4; }
template <typename Port>
void load(Port& port, const uint32_t* from) { std::memcpy(&port, from, sizeof port); }
template <typename Port>
void store(const Port& port, uint32_t* to) {
    to[words<Port>() - 1] = 0;
    std::memcpy(to, &port, sizeof port);
}

}  // namespace

extern "C" {

void* sfu_open() { return new Bench; }
void sfu_close(void* handle) { delete static_cast<Bench*>(handle); }

// values[i] is the port in the cycle in which fraction i is given.
int64_t sfu_exp2(void* handle, int64_t cycles, const uint32_t* fractions, uint32_t* values) {
    Bench& bench = *static_cast<Bench*>(handle);
    for (int64_t i = 0; i < cycles; ++i) {
        bench.dut.exp2_fraction = fractions[i];
        bench.settle();
        values[i] = bench.dut.exp2_value;
        bench.edge();
    }
    return cycles;
}

#define SFU(NAME)                                                                                                    \
    int64_t sfu_##NAME##_unit(void* handle, int64_t cycles, const uint32_t* valid, const uint32_t* units,            \
                              const uint32_t* read_rows, uint32_t* weights_valid, uint32_t* weights,                 \
                              uint32_t* busy, uint32_t* states) {                                                    \
        Bench& bench = *static_cast<Bench*>(handle);                                                                 \
        Vndp& dut = bench.dut;                                                                                       \
        constexpr std::size_t in = words<decltype(dut.NAME##_sfu_unit)>();                                           \
        constexpr std::size_t out = words<decltype(dut.NAME##_sfu_weights)>();                                       \
        constexpr std::size_t state = words<decltype(dut.NAME##_sfu_state)>();                                       \
        for (int64_t i = 0; i < cycles; ++i) {                                                                       \
            dut.NAME##_sfu_valid = valid[i];                                                                         \
            load(dut.NAME##_sfu_unit, units + i * in);                                                               \
            dut.NAME##_sfu_read_row = read_rows[i];                                                                  \
            bench.settle();                                                                                          \
            weights_valid[i] = dut.NAME##_sfu_weights_valid;                                                         \
            store(dut.NAME##_sfu_weights, weights + i * out);                                                        \
            busy[i] = dut.NAME##_sfu_busy;                                                                           \
            store(dut.NAME##_sfu_state, states + i * state);                                                         \
            bench.edge();                                                                                            \
        }                                                                                                            \
        return cycles;                                                                                               \
    }                                                                                                                \
    int64_t sfu_##NAME##_scaler(void* handle, int64_t cycles, const uint32_t* p, const uint32_t* anchors,            \
                                const uint32_t* last, const uint32_t* enable, uint32_t* scaled) {                    \
        Bench& bench = *static_cast<Bench*>(handle);                                                                 \
        Vndp& dut = bench.dut;                                                                                       \
        for (int64_t i = 0; i < cycles; ++i) {                                                                       \
            load(dut.NAME##_scaler_p, p + i * words<decltype(dut.NAME##_scaler_p)>());                               \
            load(dut.NAME##_scaler_anchors, anchors + i * words<decltype(dut.NAME##_scaler_anchors)>());             \
            dut.NAME##_scaler_last = last[i];                                                                        \
            dut.NAME##_scaler_enable = enable[i];                                                                    \
            bench.settle();                                                                                          \
            store(dut.NAME##_scaler_scaled, scaled + i * words<decltype(dut.NAME##_scaler_scaled)>());               \
            bench.edge();                                                                                            \
        }                                                                                                            \
        return cycles;                                                                                               \
    }

SFU(two)
SFU(sixteen)

}  // extern "C"
