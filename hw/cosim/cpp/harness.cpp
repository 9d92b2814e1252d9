// The Verilated device with memory, host and interrupt sink around it, as a C interface for ctypes.
//
// One cycle: drive all inputs, settle with the clock low, sample every port (what the registers will
// see), then raise the clock. NDP_CHANNELS says how many m_axi ports the design has; NDP_TRACE_VCD or
// NDP_TRACE_FST is defined where waves were compiled in.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "Vndp.h"
#include "axi_memory.h"
#include "common.h"
#include "host_port.h"
#include "io_port.h"
#include "ring_host.h"
#include "verilated.h"
#if defined(NDP_TRACE_FST)
#include "verilated_fst_c.h"
#define NDP_TRACE VerilatedFstC
#elif defined(NDP_TRACE_VCD)
#include "verilated_vcd_c.h"
#define NDP_TRACE VerilatedVcdC
#endif

// Verilator writes the double underscore of a port name as ___05F.
#define PIN(prefix, name) (&top.prefix##___05F##name)
#define WIDE(prefix, name) (top.prefix##___05F##name.data())

namespace {

// Where the assertions of a design report to, instead of ending the process.
thread_local std::string stopped;

struct Interrupt {
    uint64_t cycle, address;
    uint32_t data;
};

AxiMasterPins memory_pins(Vndp& top, int channel) {
#define BIND(i)                                                                                                       \
    case i:                                                                                                           \
        return {PIN(m_axi_##i, awid),     PIN(m_axi_##i, awlen),   PIN(m_axi_##i, awsize),  PIN(m_axi_##i, awburst),  \
                PIN(m_axi_##i, awvalid),  PIN(m_axi_##i, wlast),   PIN(m_axi_##i, wvalid),  PIN(m_axi_##i, bready),   \
                PIN(m_axi_##i, arid),     PIN(m_axi_##i, arlen),   PIN(m_axi_##i, arsize),  PIN(m_axi_##i, arburst),  \
                PIN(m_axi_##i, arvalid),  PIN(m_axi_##i, rready),  PIN(m_axi_##i, awaddr),  PIN(m_axi_##i, araddr),   \
                PIN(m_axi_##i, wstrb),    WIDE(m_axi_##i, wdata),  PIN(m_axi_##i, awready), PIN(m_axi_##i, wready),   \
                PIN(m_axi_##i, bid),      PIN(m_axi_##i, bresp),   PIN(m_axi_##i, bvalid),  PIN(m_axi_##i, arready),  \
                PIN(m_axi_##i, rid),      PIN(m_axi_##i, rresp),   PIN(m_axi_##i, rlast),   PIN(m_axi_##i, rvalid),   \
                WIDE(m_axi_##i, rdata)};
    switch (channel) {
        BIND(0)
#if NDP_CHANNELS > 1
        BIND(1)
#endif
#if NDP_CHANNELS > 2
        BIND(2)
        BIND(3)
#endif
#if NDP_CHANNELS > 4
        BIND(4)
        BIND(5)
        BIND(6)
        BIND(7)
#endif
#if NDP_CHANNELS > 8
        BIND(8)
        BIND(9)
        BIND(10)
        BIND(11)
        BIND(12)
        BIND(13)
        BIND(14)
        BIND(15)
#endif
        default:
            return {};
    }
#undef BIND
}

HostPins host_pins(Vndp& top) {
    return {PIN(s_mem, awid),    PIN(s_mem, awlen),   PIN(s_mem, awsize), PIN(s_mem, awburst), PIN(s_mem, awvalid),
            PIN(s_mem, wlast),   PIN(s_mem, wvalid),  PIN(s_mem, bready), PIN(s_mem, arid),    PIN(s_mem, arlen),
            PIN(s_mem, arsize),  PIN(s_mem, arburst), PIN(s_mem, arvalid), PIN(s_mem, rready), PIN(s_mem, awaddr),
            PIN(s_mem, araddr),  PIN(s_mem, wstrb),   WIDE(s_mem, wdata), PIN(s_mem, awready), PIN(s_mem, wready),
            PIN(s_mem, bid),     PIN(s_mem, bresp),   PIN(s_mem, bvalid), PIN(s_mem, arready), PIN(s_mem, rid),
            PIN(s_mem, rresp),   PIN(s_mem, rlast),   PIN(s_mem, rvalid), WIDE(s_mem, rdata)};
}

IoPins io_pins(Vndp& top) {
    return {PIN(s_io, awprot), PIN(s_io, awvalid), PIN(s_io, wstrb),  PIN(s_io, wvalid),  PIN(s_io, bready),
            PIN(s_io, arprot), PIN(s_io, arvalid), PIN(s_io, rready), PIN(s_io, awaddr),  PIN(s_io, araddr),
            PIN(s_io, wdata),  PIN(s_io, awready), PIN(s_io, wready), PIN(s_io, bresp),   PIN(s_io, bvalid),
            PIN(s_io, arready), PIN(s_io, rresp),  PIN(s_io, rvalid), PIN(s_io, rdata)};
}

class Harness {
  public:
    explicit Harness(const Settings& settings)
        : settings_(settings), interrupt_random_(settings.seed * 1000003 + 960) {
        context_.randReset(2);
        context_.randSeed(static_cast<int>(settings.seed % 0x7FFFFFFF) + 1);
        context_.fatalOnError(false);
        context_.assertOn(true);
#ifdef NDP_TRACE
        context_.traceEverOn(settings.trace_path != nullptr);
#endif
        top_ = std::make_unique<Vndp>(&context_, "ndp");
        for (int i = 0; i < NDP_CHANNELS; ++i)
            channels_.push_back(std::make_unique<AxiMemory>(i, NDP_CHANNELS, memory_pins(*top_, i), settings_, faults_, rules_));
        host_ = std::make_unique<HostPort>(host_pins(*top_), settings_, faults_);
        io_ = std::make_unique<IoPort>(io_pins(*top_), settings_, faults_);
#ifdef NDP_TRACE
        if (settings.trace_path) {
            trace_ = std::make_unique<NDP_TRACE>();
            top_->trace(trace_.get(), 99);
            trace_->open(settings.trace_path);
        }
#endif
        reset();
    }

    ~Harness() {
        top_->final();
#ifdef NDP_TRACE
        if (trace_) trace_->close();
#endif
    }

    // Holds reset for a few cycles; memory keeps its contents, everything under way is forgotten.
    void reset() {
        for (auto& channel : channels_) channel->reset();
        host_->reset();
        io_->reset();
        interrupts_.clear();
        interrupt_ready_ = false;
        interrupt_stable_.reset();
        top_->rst = 1;
        for (int i = 0; i < kResetCycles; ++i) {
            drive();
            clock();
        }
        top_->rst = 0;
    }

    void step() {
        drive();
        top_->clk = 0;
        top_->eval();
        dump(2 * cycle_);
        for (auto& channel : channels_) channel->sample(cycle_);
        host_->sample(cycle_);
        io_->sample(cycle_);
        sample_interrupt();
        top_->clk = 1;
        top_->eval();
        dump(2 * cycle_ + 1);
        ++cycle_;
        if (!stopped.empty()) {
            faults_.raise(cycle_ - 1, "an assertion in the design failed: %s", stopped.c_str());
            stopped.clear();
        }
    }

    // Steps until `done`; false on a fault, which a wait beyond the time limit is too.
    template <typename Done>
    bool run_until(Done done, const char* waiting_for) {
        const uint64_t limit = cycle_ + settings_.timeout_cycles;
        while (!done()) {
            if (faults_.any()) return false;
            if (cycle_ >= limit) {
                faults_.raise(cycle_, "no answer to %s within %u cycles", waiting_for, settings_.timeout_cycles);
                return false;
            }
            step();
        }
        return !faults_.any();
    }

    bool run(uint64_t cycles) {
        for (uint64_t i = 0; i < cycles && !faults_.any(); ++i) step();
        return !faults_.any();
    }

    bool store(uint64_t address, const uint8_t* data, uint64_t size) {
        // Bounded, so that a long upload does not become a long queue.
        for (uint64_t at = 0; at < size; at += kUploadBytes) {
            const uint64_t bytes = std::min<uint64_t>(kUploadBytes, size - at);
            host_->store(address + at, data + at, bytes, cycle_);
            if (!run_until([&] { return host_->stores_waiting() < kQueuedLines; }, "a host store")) return false;
        }
        return true;
    }

    bool fence() {
        return run_until([&] { return host_->stores_done(); }, "a host store");
    }

    bool load(uint64_t address, uint8_t* data, uint64_t size) {
        if (size == 0) return true;
        if (!run_until([&] { return !host_->store_covers(address, size); }, "a host store")) return false;
        const uint64_t first = address / kLineBytes * kLineBytes;
        const uint64_t lines = (address + size - 1) / kLineBytes - address / kLineBytes + 1;
        std::vector<uint8_t> buffer(lines * kLineBytes);
        host_->load(first, lines, buffer.data());
        const bool ok = run_until([&] { return host_->loads_done(); }, "a host load");
        std::memcpy(data, buffer.data() + (address - first), size);
        return ok;
    }

    bool mmio_write(uint16_t offset, uint32_t value) {
        io_->write(offset, value);
        return run_until([&] { return io_->done(); }, "a register write");
    }

    bool mmio_read(uint16_t offset, uint32_t* value) {
        io_->read(offset);
        const bool ok = run_until([&] { return io_->done(); }, "a register read");
        *value = io_->value();
        return ok;
    }

    // Drives rings until every descriptor has its completion.
    bool drive_rings(Ring* rings, uint64_t count, const Poke* pokes, uint64_t poke_count, uint64_t seed) {
        std::vector<Ring*> pointers;
        for (uint64_t i = 0; i < count; ++i) pointers.push_back(&rings[i]);
        RingHost host(pointers, pokes, poke_count, settings_, *io_, faults_, seed);
        host.begin(cycle_);
        while (!host.done() && !faults_.any()) {
            host.act(cycle_);
            step();
        }
        return !faults_.any();
    }

    uint64_t cycle() const { return cycle_; }
    const std::string& fault() const { return faults_.text(); }
    const std::vector<Interrupt>& interrupts() const { return interrupts_; }
    const Counters& counters(int channel) const { return channels_[static_cast<size_t>(channel)]->counters(); }
    // Of all channels together: the earliest first, the latest last.
    Events events() const {
        Events all{};
        const auto earliest = [](uint64_t& to, uint64_t from) { if (from && (!to || from < to)) to = from; };
        for (const auto& channel : channels_) {
            const Events& one = channel->events();
            for (unsigned who = 0; who < 3; ++who) {
                earliest(all.first_read_address[who], one.first_read_address[who]);
                earliest(all.first_read_beat[who], one.first_read_beat[who]);
                all.last_read_beat[who] = std::max(all.last_read_beat[who], one.last_read_beat[who]);
                all.last_write_committed[who] = std::max(all.last_write_committed[who], one.last_write_committed[who]);
            }
        }
        return all;
    }
    void clear_events() {
        for (auto& channel : channels_) channel->clear_events();
    }
    HostPort& host() { return *host_; }
    uint32_t io_response() const { return io_->response(); }
    MemoryRules& rules() { return rules_; }

    void flush() {
#ifdef NDP_TRACE
        if (trace_) trace_->flush();
#endif
    }

  private:
    struct InterruptPayload {
        uint64_t address;
        uint32_t data;
        bool operator==(const InterruptPayload& o) const { return address == o.address && data == o.data; }
    };

    void drive() {
        for (auto& channel : channels_) channel->drive();
        host_->drive();
        io_->drive();
        top_->msix___05Fready = interrupt_ready_;
    }

    void clock() {
        top_->clk = 0;
        top_->eval();
        dump(2 * cycle_);
        top_->clk = 1;
        top_->eval();
        dump(2 * cycle_ + 1);
        ++cycle_;
    }

    void sample_interrupt() {
        const bool valid = top_->msix___05Fvalid;
        const auto& raw = top_->msix___05Fpayload;  // {data, address}
        const InterruptPayload payload{uint64_t{raw[1]} << 32 | raw[0], raw[2]};
        interrupt_stable_.check(valid, interrupt_ready_, payload, "msix", "message", cycle_, faults_);
        if (valid && interrupt_ready_) interrupts_.push_back({cycle_, payload.address, payload.data});
        interrupt_ready_ = !interrupt_random_.chance(settings_.stall);
    }

    void dump(uint64_t time) {
#ifdef NDP_TRACE
        if (trace_) trace_->dump(time);
#else
        (void)time;
#endif
    }

    static constexpr int kResetCycles = 4;
    static constexpr uint64_t kUploadBytes = 64 * 1024;
    static constexpr size_t kQueuedLines = 4096;

    Settings settings_;
    Faults faults_;
    MemoryRules rules_;
    VerilatedContext context_;
    std::unique_ptr<Vndp> top_;
#ifdef NDP_TRACE
    std::unique_ptr<NDP_TRACE> trace_;
#endif
    std::vector<std::unique_ptr<AxiMemory>> channels_;
    std::unique_ptr<HostPort> host_;
    std::unique_ptr<IoPort> io_;
    Random interrupt_random_;
    Stable<InterruptPayload> interrupt_stable_;
    bool interrupt_ready_ = false;
    std::vector<Interrupt> interrupts_;
    uint64_t cycle_ = 0;
};

}  // namespace

// Called by Verilated code where an assertion fails or $stop is reached.
void vl_stop(const char* file, int line, const char* hierarchy) VL_MT_UNSAFE {
    if (stopped.empty())
        stopped = std::string(hierarchy && *hierarchy ? hierarchy : "ndp") + " (" + file + ":" + std::to_string(line) + ")";
}

void vl_fatal(const char* file, int line, const char* hierarchy, const char* message) VL_MT_UNSAFE {
    if (stopped.empty())
        stopped = std::string(message) + " in " + (hierarchy ? hierarchy : "ndp") + " (" + file + ":" + std::to_string(line) + ")";
}

extern "C" {

void* ndp_create(const Settings* settings) { return new Harness(*settings); }
void ndp_destroy(void* self) { delete static_cast<Harness*>(self); }
void ndp_reset(void* self) { static_cast<Harness*>(self)->reset(); }
int ndp_channels() { return NDP_CHANNELS; }

// The calls below return 1, or 0 after a fault, which ndp_fault describes and which is final.
int ndp_run(void* self, uint64_t cycles) { return static_cast<Harness*>(self)->run(cycles); }
int ndp_store(void* self, uint64_t address, const uint8_t* data, uint64_t size) {
    return static_cast<Harness*>(self)->store(address, data, size);
}
int ndp_fence(void* self) { return static_cast<Harness*>(self)->fence(); }
int ndp_load(void* self, uint64_t address, uint8_t* data, uint64_t size) {
    return static_cast<Harness*>(self)->load(address, data, size);
}
int ndp_mmio_write(void* self, uint16_t offset, uint32_t value) {
    return static_cast<Harness*>(self)->mmio_write(offset, value);
}
int ndp_mmio_read(void* self, uint16_t offset, uint32_t* value) {
    return static_cast<Harness*>(self)->mmio_read(offset, value);
}

const char* ndp_fault(void* self) { return static_cast<Harness*>(self)->fault().c_str(); }
uint64_t ndp_cycle(void* self) { return static_cast<Harness*>(self)->cycle(); }

// Response codes other than OKAY that the host received; each is reported once.
uint32_t ndp_take_store_error(void* self, uint64_t* address) {
    return static_cast<Harness*>(self)->host().take_store_error(address);
}
uint32_t ndp_take_load_error(void* self, uint64_t* address) {
    return static_cast<Harness*>(self)->host().take_load_error(address);
}
uint32_t ndp_mmio_response(void* self) { return static_cast<Harness*>(self)->io_response(); }

uint64_t ndp_interrupts(void* self) { return static_cast<Harness*>(self)->interrupts().size(); }
void ndp_interrupt(void* self, uint64_t index, uint64_t* cycle, uint64_t* address, uint32_t* data) {
    const Interrupt& one = static_cast<Harness*>(self)->interrupts()[index];
    *cycle = one.cycle;
    *address = one.address;
    *data = one.data;
}

void ndp_counters(void* self, int channel, Counters* counters) {
    *counters = static_cast<Harness*>(self)->counters(channel);
}

// Accesses of the device to DPA in [first, end) are answered with SLVERR from now on.
void ndp_add_error_range(void* self, uint64_t first, uint64_t end) {
    static_cast<Harness*>(self)->rules().errors.emplace_back(first, end);
}
// Accesses of some requesters to DPA in [first, end) are answered late_cycles later from now on; 0: never.
void ndp_add_silence(void* self, uint64_t first, uint64_t end, uint32_t requesters, uint32_t late_cycles) {
    static_cast<Harness*>(self)->rules().silences.push_back({first, end, requesters, late_cycles});
}
void ndp_clear_errors(void* self) {
    static_cast<Harness*>(self)->rules().errors.clear();
    static_cast<Harness*>(self)->rules().silences.clear();
}
void ndp_events(void* self, Events* events) { *events = static_cast<Harness*>(self)->events(); }
void ndp_clear_events(void* self) { static_cast<Harness*>(self)->clear_events(); }
// From now on the device may touch only these ranges; none: all of memory.
void ndp_set_windows(void* self, const Window* windows, uint64_t count) {
    static_cast<Harness*>(self)->rules().windows.assign(windows, windows + count);
}
int ndp_drive_rings(void* self, Ring* rings, uint64_t count, const Poke* pokes, uint64_t poke_count, uint64_t seed) {
    return static_cast<Harness*>(self)->drive_rings(rings, count, pokes, poke_count, seed);
}
void ndp_flush(void* self) { static_cast<Harness*>(self)->flush(); }

}  // extern "C"
