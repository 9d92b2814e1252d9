// The host's side of s_io (AXI4-Lite registers, the CXL.io side): one access at a time.
#pragma once

#include "common.h"

struct IoPins {
    uint8_t *awprot, *awvalid, *wstrb, *wvalid, *bready, *arprot, *arvalid, *rready;
    uint16_t *awaddr, *araddr;
    uint32_t* wdata;
    const uint8_t *awready, *wready, *bresp, *bvalid, *arready, *rresp, *rvalid;
    const uint32_t* rdata;
};

class IoPort {
  public:
    IoPort(const IoPins& pins, const Settings& settings, Faults& faults)
        : pins_(pins), settings_(settings), faults_(faults), random_(settings.seed * 1000003 + 950) {}

    void reset() {
        address_waits_ = data_waits_ = reading_waits_ = response_waits_ = read_waits_ = false;
        aw_valid_ = w_valid_ = ar_valid_ = b_ready_ = r_ready_ = false;
    }

    void write(uint16_t offset, uint32_t value) {
        offset_ = offset;
        value_ = value;
        address_waits_ = data_waits_ = response_waits_ = true;
    }
    void read(uint16_t offset) {
        offset_ = offset;
        reading_waits_ = read_waits_ = true;
    }
    bool done() const { return !response_waits_ && !read_waits_; }
    uint32_t value() const { return value_; }
    uint32_t response() const { return response_; }

    void drive() {
        *pins_.awvalid = aw_valid_;
        *pins_.awaddr = offset_;
        *pins_.awprot = 0;
        *pins_.wvalid = w_valid_;
        *pins_.wdata = value_;
        *pins_.wstrb = 15;
        *pins_.bready = b_ready_;
        *pins_.arvalid = ar_valid_;
        *pins_.araddr = offset_;
        *pins_.arprot = 0;
        *pins_.rready = r_ready_;
    }

    void sample(uint64_t cycle) {
        if (aw_valid_ && *pins_.awready) aw_valid_ = address_waits_ = false;
        if (w_valid_ && *pins_.wready) w_valid_ = data_waits_ = false;
        if (ar_valid_ && *pins_.arready) ar_valid_ = reading_waits_ = false;
        if (*pins_.bvalid) {
            if (!response_waits_ || address_waits_ || data_waits_)
                faults_.raise(cycle, "s_io: write response without a complete write");
            if (b_ready_) {
                response_ = *pins_.bresp;
                response_waits_ = false;
            }
        }
        if (*pins_.rvalid) {
            if (!read_waits_ || reading_waits_) faults_.raise(cycle, "s_io: read data without a read");
            if (r_ready_) {
                response_ = *pins_.rresp;
                value_ = *pins_.rdata;
                read_waits_ = false;
            }
        }
        // Address and data are offered independently: either may come first.
        if (!aw_valid_) aw_valid_ = address_waits_ && !random_.chance(settings_.stall);
        if (!w_valid_) w_valid_ = data_waits_ && !random_.chance(settings_.stall);
        if (!ar_valid_) ar_valid_ = reading_waits_ && !random_.chance(settings_.stall);
        b_ready_ = response_waits_ && !random_.chance(settings_.stall);
        r_ready_ = read_waits_ && !random_.chance(settings_.stall);
    }

  private:
    const IoPins pins_;
    const Settings& settings_;
    Faults& faults_;
    Random random_;
    uint16_t offset_ = 0;
    uint32_t value_ = 0, response_ = 0;
    bool address_waits_ = false, data_waits_ = false, reading_waits_ = false;  // not accepted yet
    bool response_waits_ = false, read_waits_ = false;
    bool aw_valid_ = false, w_valid_ = false, ar_valid_ = false, b_ready_ = false, r_ready_ = false;
};
