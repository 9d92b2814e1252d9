// One memory channel: an AXI4 slave on the device's m_axi port, with the device's DRAM behind it.
//
// The data bus of a DRAM channel moves one beat per cycle in one direction, so reads and writes share
// it here, taking turns where both are waiting. A write becomes visible when its response is offered,
// never earlier: whoever relies on data before its acknowledgement is caught. Every rule that the AXI
// specification puts on the master and that the device promises (whole aligned 64-byte beats, bursts
// within 4 KiB, addresses that exist) is checked at every cycle.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "common.h"

// The signals of one port. Wide data are arrays of 32-bit words, as Verilator keeps them.
struct AxiMasterPins {
    const uint8_t *awid, *awlen, *awsize, *awburst, *awvalid, *wlast, *wvalid, *bready;
    const uint8_t *arid, *arlen, *arsize, *arburst, *arvalid, *rready;
    const uint64_t *awaddr, *araddr, *wstrb;
    const uint32_t* wdata;
    uint8_t *awready, *wready, *bid, *bresp, *bvalid, *arready, *rid, *rresp, *rlast, *rvalid;
    uint32_t* rdata;
};

struct AddressPayload {
    uint64_t address;
    uint8_t id, length, size, burst;
    bool operator==(const AddressPayload& o) const {
        return address == o.address && id == o.id && length == o.length && size == o.size && burst == o.burst;
    }
};

struct WriteBeat {
    uint8_t data[kLineBytes];
    uint64_t strobe;
    bool last;
    bool operator==(const WriteBeat& o) const {
        return strobe == o.strobe && last == o.last && std::memcmp(data, o.data, kLineBytes) == 0;
    }
};

class AxiMemory {
  public:
    AxiMemory(int index, int channels, const AxiMasterPins& pins, const Settings& settings, Faults& faults,
              const MemoryRules& rules)
        : index_(index), channels_(channels), name_("m_axi_" + std::to_string(index)), pins_(pins), settings_(settings), faults_(faults),
          rules_(rules), ar_random_(salt(0)), r_random_(salt(1)), aw_random_(salt(2)),
          w_random_(salt(3)), b_random_(salt(4)) {}

    const Counters& counters() const { return counters_; }
    const Events& events() const { return events_; }
    void clear_events() { events_ = Events{}; }

    void reset() {
        reads_.clear();
        write_addresses_.clear();
        write_beats_.clear();
        collecting_.clear();
        responses_.clear();
        read_open_ = false;
        ar_ready_ = aw_ready_ = w_ready_ = r_valid_ = b_valid_ = false;
        ar_stable_.reset();
        aw_stable_.reset();
        w_stable_.reset();
        counters_ = Counters{};
    }

    // Puts this side's signals on the port, before the clock edge of a cycle.
    void drive() {
        *pins_.arready = ar_ready_;
        *pins_.awready = aw_ready_;
        *pins_.wready = w_ready_;
        *pins_.rvalid = r_valid_;
        if (r_valid_) {
            *pins_.rid = r_id_;
            *pins_.rresp = r_error_ ? 2 : 0;
            *pins_.rlast = r_last_;
            std::memcpy(pins_.rdata, r_data_, kLineBytes);
        }
        *pins_.bvalid = b_valid_;
        if (b_valid_) {
            *pins_.bid = b_id_;
            *pins_.bresp = b_error_ ? 2 : 0;
        }
    }

    // Looks at the settled port and moves on by one cycle.
    void sample(uint64_t cycle) {
        if (r_valid_ && *pins_.rready) {
            r_valid_ = false;
            const unsigned who = requester(r_id_);
            if (!events_.first_read_beat[who]) events_.first_read_beat[who] = cycle;
            events_.last_read_beat[who] = cycle;
        }
        if (b_valid_ && *pins_.bready) b_valid_ = false;
        accept_read_address(cycle);
        accept_write_address(cycle);
        accept_write_data(cycle);
        move_one_beat(cycle);
        offer_write_response(cycle);
        choose_ready();
    }

  private:
    struct Read {
        uint64_t address, due;
        uint8_t id, beats, sent;  // beats as in ARLEN: one less
    };
    struct Write {
        uint64_t address, due;
        uint8_t id;
        std::vector<WriteBeat> beats;
    };

    uint64_t salt(unsigned which) const { return settings_.seed * 1000003 + static_cast<unsigned>(index_) * 8 + which; }

    uint64_t latency(uint32_t base, Random& random) {
        return base + (settings_.latency_jitter_cycles ? random.below(settings_.latency_jitter_cycles + 1) : 0);
    }

    // DPA of the line at a channel-local byte address.
    uint64_t dpa(uint64_t local) const {
        return (local / kLineBytes * static_cast<unsigned>(channels_) + static_cast<unsigned>(index_)) * kLineBytes;
    }

    bool fails(uint64_t address) const {
        for (const auto& range : rules_.errors)
            if (address + kLineBytes > range.first && address < range.second) return true;
        return false;
    }

    static unsigned requester(uint8_t id) { return std::min(id >> kRequesterShift & 3, 2); }

    // The silence that the burst falls into, or nullptr.
    const Silence* silence(const AddressPayload& a) const {
        for (const Silence& one : rules_.silences) {
            if (!(one.requesters >> (a.id >> kRequesterShift) & 1)) continue;
            for (unsigned beat = 0; beat <= a.length; ++beat) {
                const uint64_t address = dpa(a.address + beat * uint64_t{kLineBytes});
                if (address + kLineBytes > one.first && address < one.end) return &one;
            }
        }
        return nullptr;
    }

    // Whether every line of the burst lies in one window or another of its requester.
    bool allowed(const AddressPayload& a, bool write) const {
        if (rules_.windows.empty()) return true;
        for (unsigned beat = 0; beat <= a.length; ++beat) {
            const uint64_t address = dpa(a.address + beat * uint64_t{kLineBytes});
            const bool inside = std::any_of(rules_.windows.begin(), rules_.windows.end(), [&](const Window& w) {
                return (write ? w.writes : w.reads) && (w.requesters >> (a.id >> kRequesterShift) & 1) &&
                       address >= w.first && address + kLineBytes <= w.end;
            });
            if (!inside) return false;
        }
        return true;
    }

    // `waiting`: the same address was on offer in the cycle before.
    void check_address(const char* name, const AddressPayload& a, bool waiting, uint64_t cycle) {
        const uint64_t bytes = (uint64_t{a.length} + 1) * kLineBytes;
        const uint64_t channel_bytes = settings_.memory_bytes / static_cast<unsigned>(channels_);
        const char* wrong = nullptr;
        if (a.burst != 1) wrong = "a burst type other than INCR";
        else if (a.size != 6) wrong = "a beat size other than 64 bytes";
        else if (a.address % kLineBytes) wrong = "an address that is not a multiple of 64";
        else if ((a.address & 4095) + bytes > 4096) wrong = "a burst that crosses 4 KiB";
        else if (a.address > channel_bytes || bytes > channel_bytes - a.address) wrong = "an address beyond the memory";
        else if (!waiting && !allowed(a, name[1] == 'W')) wrong = "an address outside its requester's windows";
        if (wrong)
            faults_.raise(cycle, "%s: %s offers %s (address 0x%llx, DPA 0x%llx, id %u, length %u, size %u, burst %u)",
                          name_.c_str(), name, wrong, static_cast<unsigned long long>(a.address),
                          static_cast<unsigned long long>(dpa(a.address)), a.id, a.length + 1u, a.size, a.burst);
    }

    void accept_read_address(uint64_t cycle) {
        const bool valid = *pins_.arvalid;
        if (!valid && !ar_stable_.waiting()) return;
        const AddressPayload a{*pins_.araddr, *pins_.arid, *pins_.arlen, *pins_.arsize, *pins_.arburst};
        const bool waiting = ar_stable_.waiting();
        ar_stable_.check(valid, ar_ready_, a, name_.c_str(), "AR", cycle, faults_);
        if (!valid) return;
        check_address("AR", a, waiting, cycle);
        if (faults_.any() || !ar_ready_) return;
        ++counters_.read_bursts;
        uint64_t& first = events_.first_read_address[requester(a.id)];
        if (!first) first = cycle;
        const Silence* silent = silence(a);
        if (silent && !silent->late_cycles) return;
        const uint64_t due = cycle + latency(settings_.read_latency_cycles, ar_random_);
        reads_.push_back({a.address, due + (silent ? silent->late_cycles : 0), a.id, a.length, 0});
    }

    void accept_write_address(uint64_t cycle) {
        const bool valid = *pins_.awvalid;
        if (!valid && !aw_stable_.waiting()) return;
        const AddressPayload a{*pins_.awaddr, *pins_.awid, *pins_.awlen, *pins_.awsize, *pins_.awburst};
        const bool waiting = aw_stable_.waiting();
        aw_stable_.check(valid, aw_ready_, a, name_.c_str(), "AW", cycle, faults_);
        if (!valid) return;
        check_address("AW", a, waiting, cycle);
        if (faults_.any() || !aw_ready_) return;
        write_addresses_.push_back(a);
        ++counters_.write_bursts;
    }

    void accept_write_data(uint64_t cycle) {
        const bool valid = *pins_.wvalid;
        if (!valid && !w_stable_.waiting()) return;
        WriteBeat beat;
        std::memcpy(beat.data, pins_.wdata, kLineBytes);
        beat.strobe = *pins_.wstrb;
        beat.last = *pins_.wlast;
        w_stable_.check(valid, w_ready_, beat, name_.c_str(), "W", cycle, faults_);
        if (valid && w_ready_) write_beats_.push_back(beat);
    }

    // Index in reads_ of the burst whose beat goes next, or -1.
    int next_read(uint64_t cycle) {
        if (read_open_) return static_cast<int>(open_index());
        if (reads_.empty()) return -1;
        if (settings_.response_order == kInOrder) return reads_.front().due <= cycle ? 0 : -1;
        // The oldest burst of each id that is due may go.
        uint64_t seen[4] = {};
        std::vector<int>& ready = scratch_;
        ready.clear();
        for (size_t i = 0; i < reads_.size(); ++i) {
            const uint8_t id = reads_[i].id;
            if (seen[id >> 6] >> (id & 63) & 1) continue;
            seen[id >> 6] |= uint64_t{1} << (id & 63);
            if (reads_[i].due <= cycle) ready.push_back(static_cast<int>(i));
        }
        return ready.empty() ? -1 : ready[r_random_.below(static_cast<uint32_t>(ready.size()))];
    }

    size_t open_index() const {
        for (size_t i = 0; i < reads_.size(); ++i)
            if (reads_[i].sent > 0) return i;
        return 0;
    }

    void move_one_beat(uint64_t cycle) {
        const bool can_write = !write_beats_.empty() && !write_addresses_.empty();
        const int read = r_valid_ || r_random_.chance(settings_.stall) ? -1 : next_read(cycle);
        if (read >= 0 && (!can_write || last_was_write_)) {
            read_beat(static_cast<size_t>(read));
            last_was_write_ = false;
        } else if (can_write) {
            write_beat(cycle);
            last_was_write_ = true;
        }
    }

    void read_beat(size_t position) {
        Read& read = reads_[position];
        const uint64_t address = dpa(read.address + uint64_t{read.sent} * kLineBytes);
        r_id_ = read.id;
        r_error_ = fails(address);
        r_last_ = read.sent == read.beats;
        if (r_error_) std::memset(r_data_, 0xEE, kLineBytes);
        else std::memcpy(r_data_, settings_.memory + address, kLineBytes);
        r_valid_ = true;
        ++counters_.read_beats;
        ++read.sent;
        if (r_last_) reads_.erase(reads_.begin() + static_cast<std::ptrdiff_t>(position));
        read_open_ = settings_.response_order != kReorderBeats && !r_last_;
    }

    void write_beat(uint64_t cycle) {
        const AddressPayload& a = write_addresses_.front();
        collecting_.push_back(write_beats_.front());
        write_beats_.pop_front();
        ++counters_.write_beats;
        const bool last = collecting_.size() == a.length + 1u;
        if (collecting_.back().last != last)
            faults_.raise(cycle, "%s: WLAST is %d on beat %zu of %u", name_.c_str(), collecting_.back().last,
                          collecting_.size(), a.length + 1u);
        if (!last) return;
        const Silence* silent = silence(a);
        if (silent && !silent->late_cycles) {
            collecting_.clear();
        } else {
            const uint64_t due = cycle + latency(settings_.write_latency_cycles, w_random_);
            responses_.push_back({a.address, due + (silent ? silent->late_cycles : 0), a.id, {}});
            responses_.back().beats.swap(collecting_);
        }
        write_addresses_.pop_front();
    }

    void offer_write_response(uint64_t cycle) {
        if (b_valid_ || responses_.empty() || b_random_.chance(settings_.stall)) return;
        size_t position = 0;
        if (settings_.response_order == kInOrder) {
            if (responses_.front().due > cycle) return;
        } else {
            // Walk from a random start to the first due response that is the oldest of its id.
            const size_t count = responses_.size(), start = b_random_.below(static_cast<uint32_t>(count));
            size_t tried = 0;
            for (; tried < count; ++tried) {
                position = (start + tried) % count;
                if (responses_[position].due <= cycle && oldest_of_its_id(position)) break;
            }
            if (tried == count) return;
        }
        commit(responses_[position]);
        events_.last_write_committed[requester(b_id_)] = cycle;
        responses_.erase(responses_.begin() + static_cast<std::ptrdiff_t>(position));
        b_valid_ = true;
    }

    bool oldest_of_its_id(size_t position) const {
        for (size_t i = 0; i < position; ++i)
            if (responses_[i].id == responses_[position].id) return false;
        return true;
    }

    void commit(const Write& write) {
        b_id_ = write.id;
        b_error_ = false;
        for (size_t beat = 0; beat < write.beats.size(); ++beat)
            b_error_ |= fails(dpa(write.address + beat * kLineBytes));
        if (b_error_) return;
        for (size_t beat = 0; beat < write.beats.size(); ++beat) {
            uint8_t* line = settings_.memory + dpa(write.address + beat * kLineBytes);
            const WriteBeat& source = write.beats[beat];
            if (source.strobe == ~uint64_t{0}) {
                std::memcpy(line, source.data, kLineBytes);
                continue;
            }
            for (unsigned byte = 0; byte < kLineBytes; ++byte)
                if (source.strobe >> byte & 1) line[byte] = source.data[byte];
        }
    }

    void choose_ready() {
        ar_ready_ = reads_.size() < settings_.max_bursts && !ar_random_.chance(settings_.stall);
        w_ready_ = write_beats_.size() < kWriteBuffer && !w_random_.chance(settings_.stall);
        aw_ready_ = write_addresses_.size() + responses_.size() < settings_.max_bursts &&
                    !aw_random_.chance(settings_.stall) &&
                    (!settings_.address_waits_for_data || *pins_.wvalid || !write_beats_.empty());
    }

    static constexpr size_t kWriteBuffer = 16;
    static constexpr unsigned kRequesterShift = 4;

    const int index_, channels_;
    const std::string name_;
    const AxiMasterPins pins_;
    const Settings& settings_;
    Faults& faults_;
    const MemoryRules& rules_;
    Random ar_random_, r_random_, aw_random_, w_random_, b_random_;
    Counters counters_{};
    Events events_{};

    std::deque<Read> reads_;
    std::deque<AddressPayload> write_addresses_;
    std::deque<WriteBeat> write_beats_;
    std::vector<WriteBeat> collecting_;
    std::deque<Write> responses_;
    std::vector<int> scratch_;
    bool read_open_ = false, last_was_write_ = false;

    bool ar_ready_ = false, aw_ready_ = false, w_ready_ = false, r_valid_ = false, b_valid_ = false;
    bool r_error_ = false, r_last_ = false, b_error_ = false;
    uint8_t r_id_ = 0, b_id_ = 0;
    uint8_t r_data_[kLineBytes];

    Stable<AddressPayload> ar_stable_, aw_stable_;
    Stable<WriteBeat> w_stable_;
};
