// The host's side of s_mem: ordinary loads and stores of 64-byte lines, as a CXL.mem master makes them.
//
// Stores are posted: they wait in a queue, leave in order or (when asked) in random order, and may be
// held back for a random time, so that a doorbell overtakes them. Two stores to one line keep their
// order, and a load waits for earlier stores to its line, as cache coherence has it.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>

#include "common.h"

// The signals of s_mem. Inputs of the device are pointers to mutable words.
struct HostPins {
    uint8_t *awid, *awlen, *awsize, *awburst, *awvalid, *wlast, *wvalid, *bready;
    uint8_t *arid, *arlen, *arsize, *arburst, *arvalid, *rready;
    uint64_t *awaddr, *araddr, *wstrb;
    uint32_t* wdata;
    const uint8_t *awready, *wready, *bid, *bresp, *bvalid, *arready, *rid, *rresp, *rlast, *rvalid;
    const uint32_t* rdata;
};

class HostPort {
  public:
    HostPort(const HostPins& pins, const Settings& settings, Faults& faults)
        : pins_(pins), settings_(settings), faults_(faults), order_(salt(0)), aw_random_(salt(1)), w_random_(salt(2)),
          b_random_(salt(3)), ar_random_(salt(4)), r_random_(salt(5)) {}

    void reset() {
        pending_.clear();
        write_addresses_.clear();
        write_data_.clear();
        writing_.fill(Line{});
        loads_.clear();
        reading_.fill(nullptr);
        writes_under_way_ = reads_under_way_ = 0;
        aw_valid_ = w_valid_ = ar_valid_ = b_ready_ = r_ready_ = false;
        store_error_ = load_error_ = 0;
        b_stable_.reset();
        r_stable_.reset();
    }

    // Queues a store of any alignment, as one transaction a line.
    void store(uint64_t address, const uint8_t* data, uint64_t size, uint64_t cycle) {
        while (size) {
            const uint64_t offset = address % kLineBytes, bytes = std::min<uint64_t>(size, kLineBytes - offset);
            Line line;
            line.address = address - offset;
            line.used = true;
            line.not_before = cycle + (settings_.host_delay_cycles ? order_.below(settings_.host_delay_cycles + 1) : 0);
            std::memcpy(line.data + offset, data, bytes);
            line.strobe = (bytes == kLineBytes ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1) << offset;
            pending_.push_back(line);
            address += bytes;
            data += bytes;
            size -= bytes;
        }
    }

    // Queues loads of whole lines into `out`, which must live until loads_done().
    void load(uint64_t address, uint64_t lines, uint8_t* out) {
        for (uint64_t i = 0; i < lines; ++i) loads_.push_back({address + i * kLineBytes, out + i * kLineBytes});
    }

    bool stores_done() const { return pending_.empty() && writes_under_way_ == 0; }
    bool loads_done() const { return loads_.empty() && reads_under_way_ == 0; }
    size_t stores_waiting() const { return pending_.size(); }
    bool store_covers(uint64_t address, uint64_t size) const {
        const auto overlaps = [&](const Line& line) {
            return line.used && line.address < address + size && address < line.address + kLineBytes;
        };
        return std::any_of(pending_.begin(), pending_.end(), overlaps) ||
               std::any_of(writing_.begin(), writing_.end(), overlaps);
    }

    // The first error response since the last call, as its code and address; 0 if there was none.
    uint32_t take_store_error(uint64_t* address) { return take(store_error_, store_error_address_, address); }
    uint32_t take_load_error(uint64_t* address) { return take(load_error_, load_error_address_, address); }

    void drive() {
        *pins_.awvalid = aw_valid_;
        if (aw_valid_) {
            *pins_.awid = write_addresses_.front();
            *pins_.awaddr = writing_[write_addresses_.front()].address;
            *pins_.awlen = 0;
            *pins_.awsize = 6;
            *pins_.awburst = 1;
        } else {
            *pins_.awaddr = ~uint64_t{0} >> 16;  // nothing may depend on the payload of an idle channel
            *pins_.awid = 0xFF;
        }
        *pins_.wvalid = w_valid_;
        if (w_valid_) {
            const Line& line = writing_[write_data_.front()];
            std::memcpy(pins_.wdata, line.data, kLineBytes);
            *pins_.wstrb = line.strobe;
            *pins_.wlast = 1;
        } else {
            *pins_.wstrb = ~uint64_t{0};
            *pins_.wlast = 0;
        }
        *pins_.arvalid = ar_valid_;
        *pins_.arid = ar_valid_ ? ar_id_ : 0xFF;
        *pins_.araddr = ar_valid_ ? reading_address_[ar_id_] : ~uint64_t{0} >> 16;
        *pins_.arlen = 0;
        *pins_.arsize = 6;
        *pins_.arburst = 1;
        *pins_.bready = b_ready_;
        *pins_.rready = r_ready_;
    }

    void sample(uint64_t cycle) {
        finish_offers();
        take_write_response(cycle);
        take_read_data(cycle);
        start_store(cycle);
        start_load();
        if (!aw_valid_) aw_valid_ = !write_addresses_.empty() && !aw_random_.chance(settings_.stall);
        if (!w_valid_) w_valid_ = !write_data_.empty() && !w_random_.chance(settings_.stall);
        b_ready_ = !b_random_.chance(settings_.stall);
        r_ready_ = !r_random_.chance(settings_.stall);
    }

  private:
    struct Line {
        uint64_t address = 0, strobe = 0, not_before = 0;
        bool used = false;
        uint8_t data[kLineBytes] = {};
    };
    struct Load {
        uint64_t address;
        uint8_t* out;
    };
    struct Response {
        uint8_t id, code;
        bool operator==(const Response& o) const { return id == o.id && code == o.code; }
    };
    struct Data {
        Response response;
        bool last;
        uint8_t data[kLineBytes];
        bool operator==(const Data& o) const {
            return response == o.response && last == o.last && std::memcmp(data, o.data, kLineBytes) == 0;
        }
    };

    uint64_t salt(unsigned which) const { return settings_.seed * 1000003 + 900 + which; }

    static uint32_t take(uint8_t& code, uint64_t at, uint64_t* address) {
        const uint32_t taken = code;
        if (taken) *address = at;
        code = 0;
        return taken;
    }

    void finish_offers() {
        if (aw_valid_ && *pins_.awready) {
            write_addresses_.pop_front();
            aw_valid_ = false;
        }
        if (w_valid_ && *pins_.wready) {
            write_data_.pop_front();
            w_valid_ = false;
        }
        if (ar_valid_ && *pins_.arready) ar_valid_ = false;
    }

    void take_write_response(uint64_t cycle) {
        const bool valid = *pins_.bvalid;
        const Response response{*pins_.bid, *pins_.bresp};
        b_stable_.check(valid, b_ready_, response, "s_mem", "B", cycle, faults_);
        if (!valid || !b_ready_) return;
        Line& line = writing_[response.id];
        const auto waits = [&](const std::deque<uint8_t>& queue) {
            return std::find(queue.begin(), queue.end(), response.id) != queue.end();
        };
        if (!line.used || waits(write_addresses_) || waits(write_data_)) {
            faults_.raise(cycle, "s_mem: write response with id %u, for which no write is complete", response.id);
            return;
        }
        if (response.code && !store_error_) {
            store_error_ = response.code;
            store_error_address_ = line.address;
        }
        line.used = false;
        --writes_under_way_;
    }

    void take_read_data(uint64_t cycle) {
        const bool valid = *pins_.rvalid;
        if (!valid && !r_stable_.waiting()) return;
        Data data{{*pins_.rid, *pins_.rresp}, *pins_.rlast != 0, {}};
        std::memcpy(data.data, pins_.rdata, kLineBytes);
        r_stable_.check(valid, r_ready_, data, "s_mem", "R", cycle, faults_);
        if (!valid || !r_ready_) return;
        const uint8_t id = data.response.id;
        if (!reading_[id] || (ar_valid_ && ar_id_ == id)) {
            faults_.raise(cycle, "s_mem: read data with id %u, for which no read is under way", id);
            return;
        }
        if (!data.last) faults_.raise(cycle, "s_mem: RLAST is 0 on the only beat of a read");
        if (data.response.code && !load_error_) {
            load_error_ = data.response.code;
            load_error_address_ = reading_address_[id];
        }
        std::memcpy(reading_[id], data.data, kLineBytes);
        reading_[id] = nullptr;
        --reads_under_way_;
    }

    // Next of a small rotating set of ids that is free, so that ids vary and are not reused at once.
    template <typename Busy>
    int free_id(uint8_t& next, Busy busy) {
        for (unsigned tried = 0; tried < 256; ++tried) {
            const uint8_t id = next++;
            if (!busy(id)) return id;
        }
        return -1;
    }

    bool line_under_way(uint64_t address) const {
        if (writes_under_way_ == 0) return false;
        return std::any_of(writing_.begin(), writing_.end(),
                           [&](const Line& line) { return line.used && line.address == address; });
    }

    void start_store(uint64_t cycle) {
        if (pending_.empty() || writes_under_way_ >= settings_.host_outstanding) return;
        const size_t window = settings_.host_reorder ? std::min<size_t>(pending_.size(), kReorderWindow) : 1;
        const size_t start = window > 1 ? order_.below(static_cast<uint32_t>(window)) : 0;
        for (size_t tried = 0; tried < window; ++tried) {
            const size_t position = (start + tried) % window;
            const Line& line = pending_[position];
            if (line.not_before > cycle || line_under_way(line.address)) continue;
            const auto earlier = pending_.begin() + static_cast<std::ptrdiff_t>(position);
            if (std::any_of(pending_.begin(), earlier, [&](const Line& o) { return o.address == line.address; })) continue;
            const int id = free_id(next_write_id_, [&](uint8_t candidate) { return writing_[candidate].used; });
            if (id < 0) return;
            writing_[static_cast<size_t>(id)] = line;
            write_addresses_.push_back(static_cast<uint8_t>(id));
            write_data_.push_back(static_cast<uint8_t>(id));
            pending_.erase(earlier);
            ++writes_under_way_;
            return;
        }
    }

    void start_load() {
        if (ar_valid_ || loads_.empty() || reads_under_way_ >= settings_.host_outstanding) return;
        if (ar_random_.chance(settings_.stall)) return;
        const int id = free_id(next_read_id_, [&](uint8_t candidate) { return reading_[candidate] != nullptr; });
        if (id < 0) return;
        ar_id_ = static_cast<uint8_t>(id);
        reading_[ar_id_] = loads_.front().out;
        reading_address_[ar_id_] = loads_.front().address;
        loads_.pop_front();
        ar_valid_ = true;
        ++reads_under_way_;
    }

    static constexpr size_t kReorderWindow = 32;

    const HostPins pins_;
    const Settings& settings_;
    Faults& faults_;
    Random order_, aw_random_, w_random_, b_random_, ar_random_, r_random_;

    std::deque<Line> pending_;
    std::deque<uint8_t> write_addresses_, write_data_;  // ids whose address, data were not accepted yet
    std::array<Line, 256> writing_{};
    std::deque<Load> loads_;
    std::array<uint8_t*, 256> reading_{};
    std::array<uint64_t, 256> reading_address_{};
    uint32_t writes_under_way_ = 0, reads_under_way_ = 0;
    uint8_t next_write_id_ = 0, next_read_id_ = 0, ar_id_ = 0;
    bool aw_valid_ = false, w_valid_ = false, ar_valid_ = false, b_ready_ = false, r_ready_ = false;
    uint8_t store_error_ = 0, load_error_ = 0;
    uint64_t store_error_address_ = 0, load_error_address_ = 0;
    Stable<Response> b_stable_;
    Stable<Data> r_stable_;
};
