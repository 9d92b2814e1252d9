// One Sram of the test's size: a list of accesses in, what stood on its read port after each out.
#include <cstdint>

#include "Vndp.h"
#include "verilated.h"

void vl_stop(const char*, int, const char*) {}
void vl_fatal(const char*, int, const char*, const char*) {}

// Each access is one clock edge; a negative read address means no read.
extern "C" void sram_run(int64_t count, const int32_t* reads, const int32_t* writes, const int32_t* lanes,
                         const int32_t* data, int32_t* shown) {
    VerilatedContext context;
    Vndp dut{&context, ""};
    for (int64_t i = 0; i < count; ++i) {
        dut.clk = 0;
        dut.read_enable = reads[i] >= 0;
        dut.read_address = reads[i] >= 0 ? reads[i] : 0;
        dut.write_address = writes[i];
        dut.write_enable = lanes[i];
        dut.write_data = data[i];
        dut.eval();
        dut.clk = 1;
        dut.eval();
        shown[i] = dut.read_data;
    }
}
