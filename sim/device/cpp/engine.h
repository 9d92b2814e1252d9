// The queue engine: finds descriptors in rings, feeds the core, and completes them, one small job after the
// other. hw/rtl/front/queue_engine.py says what the jobs are and which goes first; here each is one step,
// however long the engine waited for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "channels.h"
#include "constants.h"
#include "core.h"

struct Ring;

// A descriptor in a submission slot, and what becomes of it.
struct Posted {
    Ring* ring = nullptr;
    int64_t tag = 0;
    double published = kUnknown;  // cycle from which it is in memory
    bool chain = false, continues = false, resolved = false, refused = false;
    Demand demand{};
    double fetched = kUnknown, first_beat = kUnknown, last_beat = kUnknown, completed = kUnknown;
};

// A queue: its rings, and where it stands. Counts are since enabling.
struct Ring {
    int64_t index, depth, submission_line, submission_lines, result_line, result_lines;
    int64_t weight;  // slots that are read in one turn
    bool interrupts;
    std::unordered_map<int64_t, std::unique_ptr<Posted>> posted{};  // published and not completed, by count
    int64_t next_count = 0;  // slot to be read next
    int64_t flights = 0;     // reads on their way that matter
    int64_t done = 0, tail = 0, head = 0;  // completion lines sent, acknowledged, taken by the host
    bool look = false, runs = false;
    bool broken = false;     // its chain was closed since its last descriptor was handed over
    bool disabled = false;   // what is under way ends without a completion
    int64_t under_way = 0;   // descriptors in the core
    int64_t backoff = 0;
    double poll = kUnknown;  // cycle in which the poll clock next wants a look
};

struct Completion {
    int64_t queue, count, tag;
    double fetched, first_beat, last_beat, completed;
};

struct Signal {
    double cycle;
    int64_t queue;
};

class Engine {
  public:
    explicit Engine(const Settings& s)
        : s_(s), channels_(s_), core_(s_, channels_), poll_interval_(s.poll_interval), chain_timeout_(s.chain_timeout) {}

    // Registers POLL_INTERVAL, CHAIN_TIMEOUT and SHARE, of which the core's part. Polls go on as they were planned
    // until the next.
    void set_registers(double poll_interval, double chain_timeout, int64_t share) {
        poll_interval_ = poll_interval;
        chain_timeout_ = chain_timeout;
        core_.set_share(share);
    }

    // ---- the host's side, in the order of the cycles ----------------------------------------------------

    // A queue must not be busy when it is enabled again.
    void enable(std::unique_ptr<Ring> ring, double cycle) {
        doorbells_.push_back({cycle, ring.get()});
        std::unique_ptr<Ring>& place = rings_[ring->index];
        if (place) former_.push_back(std::move(place));
        place = std::move(ring);
    }

    void disable(int64_t queue) {
        Ring& ring = *rings_.at(queue);
        ring.disabled = true;
        ring.look = ring.runs = false;
        ring.poll = kUnknown;
        for (Flight& flight : flights_) flight.dead |= flight.ring == &ring;
        ring.flights = 0;
        const auto wanting = std::find(signals_.begin(), signals_.end(), &ring);
        if (wanting != signals_.end()) signals_.erase(wanting);
        if (chain_ == &ring) {
            chain_ = nullptr;
            chain_expiry_ = kUnknown;
        }
    }

    // Work of the queue is under way: in the core, or a read of a slot.
    bool busy(int64_t queue) const {
        const Ring& ring = *rings_.at(queue);
        return ring.under_way > 0 ||
               std::any_of(flights_.begin(), flights_.end(), [&](const Flight& f) { return f.ring == &ring; });
    }

    void publish(int64_t queue, int64_t count, double published, int64_t tag) {
        Ring& ring = *rings_.at(queue);
        auto posted = std::make_unique<Posted>();
        posted->ring = &ring;
        posted->tag = tag;
        posted->published = published;
        ring.posted[count] = std::move(posted);
    }

    // Says what a published descriptor asks for; without a demand it is refused.
    void resolve(int64_t queue, int64_t count, bool chain, const Demand* demand) {
        Posted& posted = *rings_.at(queue)->posted.at(count);
        posted.resolved = true;
        posted.chain = chain;
        posted.refused = demand == nullptr;
        if (demand) posted.demand = *demand;
    }

    void ring_doorbell(int64_t queue, double cycle) { doorbells_.push_back({cycle, rings_.at(queue).get()}); }

    void take(int64_t queue, int64_t head, double cycle) { heads_.push_back({cycle, rings_.at(queue).get(), head}); }

    double load_line(int64_t line, double cycle) {
        core_.advance(cycle);
        return channels_.read_line(line, cycle);
    }

    double store_line(int64_t line, double cycle) {
        core_.advance(cycle);
        return channels_.write_line(line, cycle).stored;
    }

    // ---- the walk --------------------------------------------------------------------------------------

    // Follows every job chosen up to cycle `present`; gives the cycle of the next thing known to happen. Stops
    // early where it meets a descriptor that is not resolved: `unresolved` names it.
    double advance(double present) {
        unresolved = nullptr;
        while (cycle_ <= present) {
            const double cycle = cycle_;
            const double burst = core_.advance(cycle);
            if (offered_) hand_over();
            hear(cycle);
            if (poll_ <= cycle) tick(cycle);
            const Job* oldest = core_.oldest();
            const double completed = oldest ? oldest->completed : kUnknown;
            Ring* ring = nullptr;
            if (!writes_.empty() && writes_.front().cycle <= cycle) {
                retire();
            } else if (completed <= cycle && line_free_ <= cycle && writes_in_flight() < s_.completion_writes) {
                complete(cycle);
            } else if (!heads_.empty() && heads_.front().cycle <= cycle) {
                heads_.front().ring->head = heads_.front().head;
                heads_.front().ring->look = true;
                heads_.pop_front();
            } else if (!flights_.empty() && flights_.front().arrived <= cycle && fetched_free_ <= cycle) {
                if (!inspect(cycle)) return cycle;
            } else if (!signals_.empty() && signal_free_ <= cycle) {
                signal(cycle);
            } else if (request_free_ <= cycle && static_cast<int64_t>(flights_.size()) < s_.slot_reads &&
                       (ring = next_to_issue(cycle))) {
                issue(*ring, cycle);
            } else {
                const double following = std::min(burst, next_event(cycle, completed));
                // The engine still chooses in every cycle: what comes until then may be earlier.
                if (following > present || following == kUnknown) return following;
                cycle_ = following;
                continue;
            }
            cycle_ = cycle + s_.engine_job;
        }
        return cycle_;
    }

    const Posted* unresolved = nullptr;
    int64_t unresolved_count = 0;
    std::deque<Completion> completions;
    std::deque<Signal> interrupts;
    const Channels& channels() const { return channels_; }

  private:
    struct Event {
        double cycle;
        Ring* ring;
    };
    struct Head {
        double cycle;
        Ring* ring;
        int64_t head;
    };
    struct Flight {
        Ring* ring;
        int64_t count;
        double sampled, arrived;  // memory looked at the slot; the engine can
        bool probe, dead;
    };

    int64_t writes_in_flight() const { return static_cast<int64_t>(writes_.size()); }

    // First cycle after `cycle` in which there can be something to do, as far as is known.
    double next_event(double cycle, double completed) const {
        double following = poll_;
        if (!doorbells_.empty()) following = std::min(following, doorbells_.front().cycle);
        if (!writes_.empty()) following = std::min(following, writes_.front().cycle);
        if (writes_in_flight() < s_.completion_writes) following = std::min(following, std::max(completed, line_free_));
        if (!heads_.empty()) following = std::min(following, heads_.front().cycle);
        if (!flights_.empty()) following = std::min(following, std::max(flights_.front().arrived, fetched_free_));
        if (!signals_.empty()) following = std::min(following, signal_free_);
        if (request_free_ > cycle) following = std::min(following, request_free_);
        if (chain_ && chain_expiry_ > cycle) following = std::min(following, chain_expiry_);
        return following;
    }

    // Notes the doorbells rung up to `cycle`.
    void hear(double cycle) {
        while (!doorbells_.empty() && doorbells_.front().cycle <= cycle) {
            Ring& ring = *doorbells_.front().ring;
            doorbells_.pop_front();
            if (ring.disabled) continue;
            ring.look = true;
            back_off(ring, 0, cycle);
        }
    }

    // Looks at the ring every 2**backoff poll intervals from now on.
    void back_off(Ring& ring, int64_t backoff, double cycle) {
        ring.backoff = backoff;
        if (poll_interval_ == kUnknown) return;
        // The tick at (turn + 1) intervals is the next; the ring's own are those where turn + index is a
        // multiple of 2**backoff.
        const int64_t turn = static_cast<int64_t>(std::floor(cycle / poll_interval_));
        const int64_t mask = (int64_t{1} << backoff) - 1;
        ring.poll = (turn + 1 + (-(turn + ring.index) & mask)) * poll_interval_;
        poll_ = std::min(poll_, ring.poll);
    }

    void tick(double cycle) {
        poll_ = kUnknown;
        for (auto& [index, ring] : rings_) {
            if (ring->poll <= cycle) {
                ring->look = true;
                back_off(*ring, ring->backoff, cycle);
            }
            poll_ = std::min(poll_, ring->poll);
        }
    }

    // ---- jobs ------------------------------------------------------------------------------------------

    void retire() {
        const Event write = writes_.front();
        writes_.pop_front();
        ++write.ring->tail;
        --write.ring->under_way;
        if (write.ring->disabled) return;
        back_off(*write.ring, 0, write.cycle);
        if (write.ring->interrupts) want(signals_, write.ring);
    }

    void complete(double cycle) {
        const Job& job = core_.take(cycle + (s_.engine_job - 1));
        Posted& posted = *job.posted;
        Ring& ring = *posted.ring;
        if (ring.disabled) {
            --ring.under_way;
            return;
        }
        const int64_t count = ring.done++;
        const int64_t line = ring.result_line + count % ring.depth * ring.result_lines;
        const Channels::Written written = channels_.write_line(line, cycle + (s_.engine_job + s_.line_queue));
        line_free_ = written.taken;
        writes_.push_back({written.stored + (s_.write_return + s_.acknowledged), &ring});
        completions.push_back({ring.index, count, posted.tag, posted.fetched, job.first_beat, job.last_beat, written.stored});
        ring.posted.erase(count);
    }

    void signal(double cycle) {
        Ring* ring = turn(signals_, last_signal_);
        last_signal_ = ring->index;
        signals_.erase(std::find(signals_.begin(), signals_.end(), ring));
        const double sent = cycle + s_.engine_job + s_.wait_one;
        signal_free_ = sent + 1;
        interrupts.push_back({sent, ring->index});
    }

    static void want(std::vector<Ring*>& wanting, Ring* ring) {
        if (std::find(wanting.begin(), wanting.end(), ring) == wanting.end()) wanting.push_back(ring);
    }

    // Round robin: the lowest above the one chosen last, or the lowest.
    static Ring* turn(const std::vector<Ring*>& wanting, int64_t last) {
        Ring *above = nullptr, *lowest = nullptr;
        for (Ring* ring : wanting) {
            if (!lowest || ring->index < lowest->index) lowest = ring;
            if (ring->index > last && (!above || ring->index < above->index)) above = ring;
        }
        return above ? above : lowest;
    }

    // The queue whose next slot is to be read, if there is one.
    Ring* next_to_issue(double cycle) {
        if (chain_) {
            const bool wants = chain_->runs || ((chain_->look || chain_expiry_ <= cycle) && !chain_->flights);
            return wants ? chain_ : nullptr;
        }
        wanting_.clear();
        for (auto& [index, ring] : rings_) {
            if (!ring->runs && (!ring->look || ring->flights)) continue;
            if (turn_left_ && index == last_issue_) return ring.get();
            wanting_.push_back(ring.get());
        }
        return turn(wanting_, last_issue_);
    }

    void issue(Ring& ring, double cycle) {
        turn_left_ = (turn_left_ && ring.index == last_issue_ ? turn_left_ : ring.weight) - 1;
        last_issue_ = ring.index;
        hear(cycle + (s_.engine_job - 1));
        if (!ring.flights) ring.look = false;
        const bool probe = &ring == chain_ && chain_expiry_ <= cycle;
        if (ring.next_count - ring.head >= ring.depth) {
            ring.runs = false;
            if (probe) close_chain();
            return;
        }
        const double request = cycle + s_.engine_job;
        core_.advance(request);
        const int64_t line = ring.submission_line + ring.next_count % ring.depth * ring.submission_lines;
        const double arrived = channels_.read_line(line, request);
        flights_.push_back({&ring, ring.next_count, arrived - s_.read_return,
                            arrived + s_.slot_arrived, probe, false});
        ++ring.next_count;
        ++ring.flights;
        request_free_ = request + s_.wait_one + 1;
    }

    void close_chain() {
        chain_->broken = true;
        chain_ = nullptr;
        chain_expiry_ = kUnknown;
    }

    // Lets the next slot be that of `flight` again, and disowns the later reads of its queue.
    void go_back(const Flight& flight) {
        flight.ring->next_count = flight.count;
        flight.ring->flights = 0;
        for (Flight& other : flights_) other.dead |= other.ring == flight.ring;
    }

    // False: the slot holds a descriptor that is not resolved; nothing has happened yet.
    bool inspect(double cycle) {
        const Flight flight = flights_.front();
        Ring& ring = *flight.ring;
        Posted* posted = nullptr;
        if (!flight.dead && !(chain_ && chain_ != &ring)) {
            const auto found = ring.posted.find(flight.count);
            if (found != ring.posted.end() && found->second->published <= flight.sampled) posted = found->second.get();
            if (posted && !posted->resolved) {
                unresolved = posted;
                unresolved_count = flight.count;
                return false;
            }
        }
        flights_.pop_front();
        if (flight.dead) return true;
        --ring.flights;
        if (posted) {
            ring.runs = true;
            ring.broken = false;
            ++ring.under_way;
            back_off(ring, 0, cycle);
            posted->continues = chain_ != nullptr;
            chain_ = posted->chain ? &ring : nullptr;
            chain_expiry_ = kUnknown;
            offered_ = posted;
            offer_ = cycle + s_.engine_job;
            fetched_free_ = kUnknown;
            return true;
        }
        go_back(flight);
        if (chain_ && chain_ != &ring) {
            ring.look = true;
            return true;
        }
        ring.runs = false;
        if (chain_) {
            if (flight.probe) close_chain();
        } else if (ring.backoff < s_.backoff_log2) {
            back_off(ring, ring.backoff + 1, cycle);
        }
        return true;
    }

    // Gives the core the descriptor that is on offer, once it is known when there is room.
    void hand_over() {
        const double cycle = std::max(offer_, core_.room());
        if (cycle == kUnknown) return;
        offered_->fetched = cycle;
        core_.accept(cycle, offered_->refused ? nullptr : &offered_->demand, offered_->continues, offered_);
        offered_ = nullptr;
        fetched_free_ = cycle + 1;
        if (chain_) chain_expiry_ = cycle + chain_timeout_;
    }

    const Settings s_;
    Channels channels_;
    Core core_;
    std::map<int64_t, std::unique_ptr<Ring>> rings_;
    std::vector<std::unique_ptr<Ring>> former_;  // disabled and enabled again: descriptors of theirs may be in the core
    double poll_interval_, chain_timeout_;
    double cycle_ = 0;  // first cycle in which the engine may choose its next job
    std::deque<Event> doorbells_, writes_;
    std::deque<Head> heads_;
    std::deque<Flight> flights_;
    double request_free_ = 0, line_free_ = 0, signal_free_ = 0, fetched_free_ = 0;
    Posted* offered_ = nullptr;
    double offer_ = 0;
    int64_t last_issue_ = -1, last_signal_ = -1;
    int64_t turn_left_ = 0;  // slots that the queue of the last issue may still read in its turn
    std::vector<Ring*> signals_, wanting_;
    Ring* chain_ = nullptr;
    double chain_expiry_ = kUnknown, poll_ = kUnknown;
};
