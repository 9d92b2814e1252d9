// ProductBench of bench.py behind C functions that move whole arrays of stimuli and responses.
#include <cmath>
#include <cstdint>
#include <vector>

#include "Vndp.h"
#include "verilated.h"

void vl_stop(const char*, int, const char*) {}
void vl_fatal(const char*, int, const char*, const char*) {}

namespace {

struct Bench {
    VerilatedContext context;
    Vndp dut{&context, ""};
};

// Value of a finite FP16 bit pattern, in units of its last subnormal bit, 2**-24.
double units(uint32_t bits) {
    uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    double magnitude = std::ldexp(fraction + (exponent ? 1024.0 : 0.0), exponent ? int(exponent) - 1 : 0);
    return bits >> 15 ? -magnitude : magnitude;
}

}  // namespace

extern "C" {

void* product_open() { return new Bench; }
void product_close(void* handle) { delete static_cast<Bench*>(handle); }

// addend is the port's; flags are bit 0 negative, 1 NaN, 2 infinite, 3 clipped.
int64_t product_some(void* handle, int64_t count, const uint16_t* a, const uint16_t* b, const uint8_t* enable,
                     uint64_t* addend, uint8_t* flags) {
    Vndp& dut = static_cast<Bench*>(handle)->dut;
    for (int64_t i = 0; i < count; ++i) {
        dut.a = a[i];
        dut.b = b[i];
        dut.enable = enable[i];
        dut.eval();
        addend[i] = dut.addend;
        flags[i] = dut.flags;
    }
    return count;
}

// Every product of first <= a < end with all b, against double arithmetic, which is exact here:
// 22-bit products, then whole steps. Returns the number of wrong ones; the last of them in *wrong.
int64_t product_all(void* handle, int64_t first, int64_t end, int64_t lsb_exponent, int64_t product_bits,
                    uint32_t* wrong) {
    Vndp& dut = static_cast<Bench*>(handle)->dut;
    const double scale = std::ldexp(1.0, -48 - lsb_exponent), limit = std::ldexp(1.0, product_bits);
    std::vector<double> units_of(0x10000);
    for (uint32_t b = 0; b < 0x10000; ++b) units_of[b] = units(b);
    int64_t mismatches = 0;
    dut.enable = 1;
    for (uint32_t a = first; a < end; ++a) {
        const bool special_a = (a & 0x7C00) == 0x7C00;
        const double units_a = units_of[a] * scale;
        dut.a = a;
        for (uint32_t b = 0; b < 0x10000; ++b) {
            dut.b = b;
            dut.eval();
            const bool special_b = (b & 0x7C00) == 0x7C00;
            const uint32_t flags = dut.flags;
            const bool negative = (a ^ b) >> 15 & 1;
            bool good;
            if (special_a || special_b) {
                const bool nan = (special_a && (a & 0x3FF)) || (special_b && (b & 0x3FF)) || !(a & 0x7FFF) || !(b & 0x7FFF);
                good = (flags >> 1 & 1) == nan && (flags & 8) == 0 && (nan || ((flags & 4) && (flags & 1) == negative));
            } else {
                const double steps = std::trunc(std::fabs(units_a * units_of[b]));
                if (steps >= limit) {
                    good = flags == (8u | negative);
                } else {
                    const int64_t value = int64_t(dut.addend) + negative - (int64_t(1) << product_bits);
                    good = flags == negative && value == (negative ? -int64_t(steps) : int64_t(steps));
                }
            }
            if (!good) {
                ++mismatches;
                *wrong = a << 16 | b;
            }
        }
    }
    return mismatches;
}

}  // extern "C"
