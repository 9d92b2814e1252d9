// The NDP core, descriptor by descriptor and burst by burst.
//
// Times are cycles in which something happens, as an observer of the RTL's signals counts them. Nothing
// here walks through cycles: between two decisions of the core, everything follows from when its inputs
// were there. The decisions are which burst goes next, an operand's or a device operand's, and with that the
// order in which memory delivers. Bursts are therefore handled in the order of time, all else as soon as it
// is known. Names of units are those of hw/rtl/core.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <vector>

#include "channels.h"
#include "constants.h"

struct Posted;

// A descriptor in the core, and when it got where.
struct Job {
    Posted* posted = nullptr;
    Demand demand{};
    bool refused = false;
    bool continues = false;        // a chain whose descriptor before it is in the core too
    double accepted = kUnknown;    // taken by the instruction buffer
    double given = kUnknown;       // left the decoder
    double arrived = kUnknown;     // its operand counts as arrived
    double granted = kUnknown;     // let into the array
    double first_beat = kUnknown, last_beat = kUnknown;
    double collected = kUnknown;   // its last result is in the output buffer
    double read_out = kUnknown;    // its last result line is read from the output buffer
    double emptied = kUnknown;     // that line has left
    double acknowledged = 0;       // so far
    double passed = kUnknown;      // it needs nothing of the core but acknowledgements
    double completed = kUnknown;   // offered to the queue engine as completed
    double done = kUnknown;        // the queue engine has taken it
    int64_t left = 0;              // beats of one pass that the array has not seen yet
    int64_t scales = 0;            // stripes of scales that it has
};

// Entries by number, of which only the latest `Size` are looked at.
template <typename Entry, int64_t Size>
class Recent {
    static_assert((Size & (Size - 1)) == 0, "a power of two");

  public:
    Entry& operator[](int64_t number) { return entries_[static_cast<size_t>(number & (Size - 1))]; }

  private:
    std::array<Entry, static_cast<size_t>(Size)> entries_{};
};

// Where in a device operand its beats lie. Of integers a stripe holds several beats, and before every frame of them, of
// values in each row group anew, lies a stripe of scales.
inline int64_t pass_beats(const Demand& d) { return d.groups * d.beats; }

inline int64_t frame_stripes(const Demand& d) { return 1 + (d.frame_beats >> d.expansion_log2); }

// Beats in the first `stripes` stripes.
inline int64_t beats_in(const Demand& d, int64_t stripes) {
    if (!d.frame_beats) return stripes;
    const int64_t group = d.group_stripes ? stripes / d.group_stripes : 0;
    stripes -= group * d.group_stripes;
    const int64_t rest = std::max<int64_t>(stripes % frame_stripes(d) - 1, 0);
    const int64_t beats = stripes / frame_stripes(d) * d.frame_beats + (rest << d.expansion_log2);
    return group * d.beats + std::min(beats, d.group_stripes ? d.beats : pass_beats(d));
}

inline bool is_scales(const Demand& d, int64_t stripe) {
    return d.frame_beats && (d.group_stripes ? stripe % d.group_stripes : stripe) % frame_stripes(d) == 0;
}

// Stripes of scales that lie before the last of the first `beats` beats.
inline int64_t scales_before(const Demand& d, int64_t beats) {
    if (!d.frame_beats) return 0;
    const int64_t group = d.group_stripes ? beats / d.beats : 0;
    return group * d.frames + (beats - group * d.beats + d.frame_beats - 1) / d.frame_beats;
}

// Stripes, those of scales left out, that are not needed any more after so many beats.
inline int64_t stripes_behind(const Demand& d, int64_t beats) {
    if (!d.frame_beats) return beats;
    const int64_t run = d.group_stripes ? d.beats : pass_beats(d);  // ends with a stripe of its own
    const int64_t stripes = (d.group_stripes ? d.group_stripes : d.stripes) - d.frames;
    return beats / run * stripes + (beats % run >> d.expansion_log2);
}

class Core {
  public:
    Core(const Settings& s, Channels& channels)
        : s_(s), channels_(channels), longest_(std::min(s.page_words, s.dram_buffer_stripes / s.burst_share)),
          space_(s.input_buffer_stripes), share_(s.share) {}

    // First cycle in which the instruction buffer takes another descriptor; unknown while that is open.
    double room() {
        if (accepted_ < s_.instruction_buffer_depth) return 0;
        return jobs_[accepted_ - s_.instruction_buffer_depth].given + 1;
    }

    // Takes a descriptor in `cycle`, not before `room`; no demand: it is refused. `continues`: it goes on with the
    // chain of the one before it.
    void accept(double cycle, const Demand* demand, bool continues, Posted* posted) {
        Job& job = jobs_[accepted_++];
        job = Job{};
        job.posted = posted;
        job.refused = demand == nullptr;
        if (demand) job.demand = *demand;
        job.accepted = cycle;
        job.continues = continues;
        changed_ = true;
    }

    // The descriptor that completes next; null if the core is empty.
    const Job* oldest() { return retired_ < accepted_ ? &jobs_[retired_] : nullptr; }

    // The queue engine takes the completion of the oldest descriptor in `cycle`.
    const Job& take(double cycle) {
        Job& job = jobs_[retired_++];
        job.done = cycle;
        changed_ = true;
        return job;
    }

    // Register SHARE: words that a channel may owe the core; 0: any number.
    void set_share(int64_t words) { share_ = words; }

    // Follows everything that is decided up to cycle `present`; gives the cycle of the next decision known.
    double advance(double present) {
        if (!changed_ && next_ > present) return next_;
        changed_ = false;
        for (;;) {
            decode();
            begin_weights();
            consume();
            retire();
            const double operand = std::max(operand_offer_, broadcast_free_);
            const double weight = std::max({weight_offer_, room_for_weights(), broadcast_free_});
            const double request = next_request();
            next_ = std::min({operand, weight, request});
            if (next_ > present || next_ == kUnknown) return next_;
            if (request <= next_) read_burst();
            else if (operand <= weight) send_operand(operand);
            else send_weight(weight);
        }
    }

  private:
    struct Burst {
        int64_t words;
        int64_t beats = 0;           // of a device operand
        bool ends_in_scales = false;
        Job* operand = nullptr;      // whose GPU operand it ends
        double earliest = kUnknown;  // cycle in which it can be on the bus
    };

    // ---- from the decoder to the bursts --------------------------------------------------------------

    // Lets the decoder give what it can.
    void decode() {
        while (given_ < accepted_) {
            Job& job = jobs_[given_];
            double cycle = std::max(job.accepted + s_.instruction_buffer, decoder_free_) + s_.decode;
            if (given_ >= s_.records) cycle = std::max(cycle, jobs_[given_ - s_.records].passed + 1);
            if (!job.refused) {
                if (work_given_ >= s_.job_slots)
                    cycle = std::max(cycle, jobs_[work_[work_given_ - s_.job_slots]].last_beat + 1);
                if (job.demand.load) {
                    if (operand_job_) return;
                    cycle = std::max({cycle, operand_idle_, space_cycle(job.demand.operand_space)});
                }
            }
            if (cycle == kUnknown) return;
            job.given = cycle;
            decoder_free_ = cycle + 1;
            if (!job.refused) {
                work_[work_given_++] = given_;
                job.left = pass_beats(job.demand);
                if (job.demand.load) {
                    take_space(job.demand.operand_space, cycle);
                    operand_job_ = &job;
                    operand_left_ = job.demand.operand_stripes;
                    operand_address_ = job.demand.operand_stripe;
                    operand_offer_ = cycle + s_.burst_cut;
                }
            }
            ++given_;
        }
    }

    // First cycle in which the input buffer has `wanted` stripes free, as far as is known.
    double space_cycle(int64_t wanted) const {
        int64_t free = space_;
        if (wanted <= free) return 0;
        for (const Return& returned : returns_) {
            free += returned.stripes;
            if (wanted <= free) return returned.cycle;
        }
        return kUnknown;
    }

    void take_space(int64_t wanted, double cycle) {
        while (!returns_.empty() && returns_.front().cycle <= cycle) {
            space_ += returns_.front().stripes;
            returns_.pop_front();
        }
        space_ -= wanted;
    }

    // Hands the next job's device operand to the weight reader.
    void begin_weights() {
        if (weight_job_ || weights_taken_ >= work_given_) return;
        Job& job = jobs_[work_[weights_taken_]];
        weight_job_ = &job;
        weight_left_ = job.demand.stripes;
        weight_address_ = job.demand.device_stripe;
        const bool held = job.demand.pairs > 1 && job.demand.group_stripes >= longest_;
        group_ = group_left_ = held || job.demand.skip ? job.demand.group_stripes : 0;
        weight_offer_ = std::max(job.given + s_.queue, weight_idle_) + s_.burst_cut;
    }

    int64_t page_left(int64_t address) const { return s_.page_words - address % s_.page_words; }

    int64_t weight_words() const {
        return std::min({longest_, weight_left_, page_left(weight_address_), group_ ? group_left_ : longest_});
    }

    // First cycle in which the DRAM buffer has room for the next weight burst, as far as is known.
    double room_for_weights() {
        if (!weight_job_) return kUnknown;
        const int64_t wanted = asked_ + weight_words() - s_.dram_buffer_stripes;
        if (wanted <= 0) return 0;
        // Runs that only free what was free before are of no use any more.
        while (freed_.size() > 1 && freed_.front().end < wanted) freed_.pop_front();
        for (const Freed& run : freed_) {
            if (wanted > run.end) continue;
            const int64_t later = run.end - wanted;
            return run.last - later / run.stripes * run.period - later % run.stripes * run.step + 1;
        }
        return kUnknown;
    }

    // A burst that the broadcast takes in cycle `offer`; the channels' queues take it when there is room.
    void offer_burst(double offer, Burst burst) {
        double taken = offer + 1;
        if (bursts_ >= s_.bursts_in_flight) taken = std::max(taken, spans_[bursts_ - s_.bursts_in_flight].last + 1);
        if (bursts_ >= s_.request_queue) {
            next_request();
            taken = std::max(taken, requests_[bursts_ - s_.request_queue] + 1);
        }
        broadcast_free_ = taken;
        burst.earliest = taken + s_.burst_request;
        offered_.push_back(burst);
        ++bursts_;
    }

    // Cycle in which the oldest burst on offer is on the bus: no channel may owe the core more words than SHARE says.
    double next_request() {
        if (offered_.empty()) return kUnknown;
        if (request_ != kUnknown) return request_;
        const double before = bursts_read_ > 0 ? requests_[bursts_read_ - 1] + 1 : 0;
        request_ = std::max(offered_.front().earliest, before);
        const int64_t answered = share_ ? words_read_ + offered_.front().words - share_ : 0;
        if (answered > 0) request_ = std::max(request_, word_cycle(answered) + 1);
        // The next goes when the slowest channel has taken this one: in whole cycles, as what matters here is which
        // burst the next will most likely be.
        if (request_ > before) requests_in_a_row_ = 0;
        const double waited = std::round(channels_.waited(requests_in_a_row_++));
        requests_[bursts_read_] = request_ + std::round(channels_.waited(requests_in_a_row_)) - waited;
        return request_;
    }

    // Cycle in which word `number` of those read so far is on the bus, counted from 1.
    double word_cycle(int64_t number) {
        int64_t burst = bursts_read_ - 1;
        int64_t end = words_read_;
        while (end - spans_[burst].words >= number) end -= spans_[burst--].words;
        return spans_[burst].at(number - 1 - (end - spans_[burst].words));
    }

    // The oldest burst on offer is on the bus.
    void read_burst() {
        const double request = next_request();
        const Burst burst = offered_.front();
        offered_.pop_front();
        request_ = kUnknown;
        const Channels::Span span = channels_.read_all(request, burst.words);
        spans_[bursts_read_++] = {span.first, span.last, burst.words};
        words_read_ += burst.words;
        const double first = span.first + s_.rendezvous, last = span.last + s_.rendezvous;
        if (burst.operand) burst.operand->arrived = last;
        else if (burst.beats || burst.ends_in_scales) pieces_.push_back({first, last, burst.beats, burst.ends_in_scales});
    }

    void send_operand(double cycle) {
        const int64_t words = std::min(operand_left_, page_left(operand_address_));
        operand_left_ -= words;
        operand_address_ += words;
        offer_burst(cycle, {words, 0, false, operand_left_ ? nullptr : operand_job_});
        if (operand_left_) {
            operand_offer_ = cycle + s_.burst_cut;
            return;
        }
        operand_job_ = nullptr;
        operand_offer_ = kUnknown;
        operand_idle_ = cycle + 1;
    }

    void send_weight(double cycle) {
        const int64_t words = weight_words();
        const Demand& d = weight_job_->demand;
        const int64_t end = d.stripes - weight_left_ + words;
        offer_burst(cycle, {words, beats_in(d, end) - beats_in(d, end - words), is_scales(d, end - 1)});
        asked_ += words;
        weight_left_ -= words;
        weight_address_ += words;
        weight_offer_ = cycle + s_.burst_cut;
        if (group_) {
            group_left_ -= words;
            if (!group_left_) {
                group_left_ = group_;
                weight_address_ += weight_job_->demand.skip;
                weight_offer_ += weight_job_->demand.skip ? s_.burst_skip : 0;
            }
        }
        if (weight_left_) return;
        weight_job_ = nullptr;
        ++weights_taken_;
        weight_offer_ = kUnknown;
        weight_idle_ = cycle + 1;
    }

    // ---- beats ---------------------------------------------------------------------------------------

    // Walks the array through every stripe that has arrived.
    void consume() {
        while (work_ended_ < work_given_) {
            Job& job = jobs_[work_[work_ended_]];
            if (job.granted == kUnknown && !grant(job)) return;
            while (job.left)
                if (!walk(job)) return;
            end(job);
        }
    }

    // Lets the job into the array; false if it is not known when.
    bool grant(Job& job) {
        double cycle = job.given + s_.queue;
        if (job.demand.load) cycle = std::max(cycle, job.arrived);
        else if (job.demand.from_kept)
            cycle = std::max(cycle, (job.demand.from_previous ? previous_ : kept_) + 1 + job.demand.settle_cycles);
        if (work_ended_ > 0) cycle = std::max(cycle, jobs_[work_[work_ended_ - 1]].last_beat + 1);
        if (work_ended_ >= s_.finished) cycle = std::max(cycle, jobs_[work_[work_ended_ - s_.finished]].passed + 1);
        const bool to_memory = job.demand.destination == kMemory;
        if (to_memory && memory_jobs_ >= kResultHalves)
            cycle = std::max(cycle, jobs_[halves_[memory_jobs_ - kResultHalves]].read_out + 1);
        if (cycle == kUnknown) return false;
        job.granted = cycle;
        if (job.demand.load) {
            if (resident_) returns_.push_back({cycle + 1, resident_});
            resident_ = job.demand.operand_space;
        }
        if (to_memory) halves_[memory_jobs_++] = work_[work_ended_];
        issue_ = std::max(issue_, cycle + s_.grant - 1);  // the cycle before its first beat at the earliest
        return true;
    }

    // Beats on stripes that have arrived: the rest of a row group, or several whole ones; false if it needs more.
    bool walk(Job& job) {
        if (pieces_.empty()) return false;
        const int64_t beats = job.demand.beats, begun = done(job) % beats;
        const Piece piece = pieces_.front();
        if (!piece.beats) {
            use(job, 0);
            return true;
        }
        if (!begun && piece.beats >= beats && job.demand.pairs == 1) {
            const int64_t groups = std::min(piece.beats, job.left) / beats;
            whole_groups(job, groups, piece.first, piece.at(groups * beats - 1));
            use(job, groups * beats);
            return true;
        }
        return one_group(job, beats - begun);
    }

    // Stripes of scales before the next `beats` beats: a cycle each.
    void load_scales(Job& job, int64_t beats, double first) {
        run_scales(job, scales_before(job.demand, done(job) + beats) - job.scales, first);
    }

    // Those of a pass over values are kept for the passes after it.
    void run_scales(Job& job, int64_t count, double first) {
        if (count <= 0) return;
        run(job, count, first, first, kGoesOn);
        job.scales += count;
        if (job.demand.pairs == 1 || !job.demand.group_stripes) free_stripes(count, count, 0, 1);
    }

    // Scales of values in each pass.
    int64_t group_scales(const Job& job) const { return job.demand.group_stripes ? job.demand.frames : 0; }

    // Takes `beats` off the front of the first piece.
    void use(Job& job, int64_t beats) {
        Piece& piece = pieces_.front();
        if (beats == piece.beats) {
            job.left -= beats;
            if (piece.ends_in_scales) run_scales(job, 1, piece.last);
            pieces_.pop_front();
            return;
        }
        piece.first = piece.at(beats);
        piece.beats -= beats;
        job.left -= beats;
    }

    // What is missing of one row group, from as many pieces as it takes.
    bool one_group(Job& job, int64_t missing) {
        const int64_t pairs = job.demand.pairs;
        if (pairs > 1) {
            int64_t there = 0;
            for (const Piece& piece : pieces_) there += piece.beats;
            if (there < missing) return false;  // the passes after the first are reckoned with it
        }
        const int64_t pause = pause_cycles(job, job.left == missing);
        while (missing && !pieces_.empty()) {
            const Piece piece = pieces_.front();
            const int64_t here = std::min(piece.beats, missing);
            missing -= here;
            load_scales(job, here, piece.first);
            if (here) run(job, here, piece.first, piece.at(here - 1), missing ? kGoesOn : pause);
            if (pairs == 1) free_beats(job, done(job), here, here);
            use(job, here);
        }
        if (missing) return false;
        if (pairs > 1) {
            repeat(job, pairs - 1, pause);
            free_beats(job, done(job) - job.demand.beats, job.demand.beats, job.demand.beats);
            if (group_scales(job)) free_stripes(group_scales(job), group_scales(job), 0, 0);
        }
        return true;
    }

    // Beats of one pass that the array has seen.
    int64_t done(const Job& job) const { return pass_beats(job.demand) - job.left; }

    bool drains(const Job& job) const { return job.demand.destination != kAccumulators; }

    // Cycles without another last beat after one of this job: in its last row group, or before.
    int64_t pause_cycles(const Job& job, bool last_group) const {
        return drains(job) ? job.demand.merge_cycles + (last_group ? job.demand.anchor_cycles : 0) : kGoesOn;
    }

    // Cycles from one pass over a group to the next where nothing else holds it up.
    int64_t pass_cycles(const Job& job, int64_t pause) const {
        return std::max({job.demand.beats + group_scales(job), job.demand.beat_cycles, pause + 1});
    }

    // `groups` whole row groups of a single pair, whose stripes arrive from `first` to `last`.
    void whole_groups(Job& job, int64_t groups, double first, double last) {
        const int64_t beats = job.demand.beats, exact = std::min(groups, exact_passes(job));
        const double slope = groups * beats > 1 ? (last - first) / (groups * beats - 1) : 1;
        const int64_t pause = pause_cycles(job, false);
        const bool ends = job.left == groups * beats;
        for (int64_t group = 0; group < exact; ++group) {
            const double start = first + slope * (group * beats);
            load_scales(job, (group + 1) * beats, start);
            run(job, beats, start, start + slope * (beats - 1), pause_cycles(job, ends && group == groups - 1));
        }
        double period = pass_cycles(job, pause);
        if (groups > exact) {
            const int64_t scales = scales_before(job.demand, done(job) + groups * beats) - job.scales;
            // Those of keys take a cycle of their own where passes leave none free.
            const int64_t own = group_scales(job) || period > beats ? 0 : scales;
            shift(std::max((groups - exact) * period + own, last - issue_));
            job.scales += scales;
            if (scales) free_stripes(scales, scales, 0, period / scales);
            if (ends) merge_free_ += job.demand.anchor_cycles;
        }
        period = std::max(period, slope * beats);
        if (job.demand.frame_beats) free_beats(job, done(job), groups * beats, groups * period);
        else free_stripes(groups * beats, beats, period, 1);
    }

    // Further passes over a group that is all there.
    void repeat(Job& job, int64_t passes, int64_t pause) {
        const int64_t exact = std::min(passes, exact_passes(job));
        for (int64_t pass = 0; pass < exact; ++pass) {
            if (group_scales(job)) run(job, group_scales(job), 0, 0, kGoesOn);
            run(job, job.demand.beats, 0, 0, pause);
        }
        shift((passes - exact) * pass_cycles(job, pause));
    }

    // After so many passes of one kind every further one takes as long as the last: all stages are full.
    int64_t exact_passes(const Job& job) const { return kStages + job.demand.rescale_cycles; }

    void shift(double cycles) {
        issue_ += cycles;
        move_ += cycles;
        read_ += cycles;
        array_ += cycles;
        merge_free_ += cycles;
        behind_scores_ += cycles;
        for (double& read : reads_) read += cycles;
    }

    // `beats` beats of one pass whose stripes arrive from `first` to `last`, then `pause` cycles without a last beat;
    // `kGoesOn`: the last of them ends no sum.
    //
    // A beat is issued, moves on a cycle later, has its softmax terms scaled if they are its operand, reads its weights,
    // and is accepted by the array; each stage holds one. Without a wait these are a cycle apart, so that only the first
    // and the last beat need be looked at.
    void run(Job& job, int64_t beats, double first, double last, int64_t pause) {
        const int64_t scaled = job.demand.rescale_cycles, further = beats - 1;
        // What moves on leaves room to what is issued; nothing does before the beat so many stages ahead has.
        double issue = std::max({issue_ + 1, move_, first});
        double move = std::max(issue + 1, scaled ? reads_[0] : array_);
        double read = std::max(move + scaled, array_);
        if (job.first_beat == kUnknown) job.first_beat = issue;
        if (further) {
            const double room = further < scaled ? reads_[static_cast<size_t>(further)] : read + further - scaled;
            issue = std::max({issue + further, move + further - 1, last});
            move = std::max({issue + 1, move + further, room});
            read = std::max(move + scaled, read + further);
        }
        if (pause != kGoesOn && !job.demand.softmax_cycles && issue < behind_scores_) {
            issue = behind_scores_;
            move = std::max(move, issue + 1);
            read = std::max(read, move + scaled);
        }
        double array = read + 1;
        if (pause != kGoesOn) {
            array = std::max(array, merge_free_);
            merge_free_ = array + 1 + pause;
        }
        if (scaled) {
            for (int64_t stage = 0; stage < kScaleStages; ++stage) {
                const int64_t before = kScaleStages - 1 - stage;  // beats between it and the last
                reads_[stage] = before < beats ? read - before : reads_[stage + beats];
            }
        }
        issue_ = issue;
        move_ = move;
        read_ = read;
        array_ = array + (job.demand.beat_cycles - 1);
        if (pause != kGoesOn && job.demand.softmax_cycles) behind_scores_ = array_ + job.demand.softmax_cycles;
    }

    // The array is done with the stripes of the `beats` after the first `done`, which it ate in so many cycles.
    void free_beats(const Job& job, int64_t done, int64_t beats, double cycles) {
        const int64_t stripes = stripes_behind(job.demand, done + beats) - stripes_behind(job.demand, done);
        if (stripes) free_stripes(stripes, stripes, 0, cycles / stripes);
    }

    // The array is done with `count` stripes more, the last of them in this beat.
    void free_stripes(int64_t count, int64_t stripes, double period, double step) {
        freed_count_ += count;
        freed_.push_back({freed_count_, stripes, read_, period, step});
    }

    // The job had its last beat.
    void end(Job& job) {
        job.last_beat = issue_;
        if (drains(job)) {
            job.collected =
                array_ + s_.array + pause_cycles(job, true) + job.demand.softmax_cycles + s_.collect;
            if (job.demand.begins_terms) previous_ = kept_;
            if (job.demand.destination == kKept) kept_ = job.collected;
        }
        ++work_ended_;
    }

    // ---- results -------------------------------------------------------------------------------------

    // Sends results and offers completions, in order, once it is known when. While the lines of one result are sent,
    // those of the one before may wait for their acknowledgements.
    void retire() {
        while (passed_ < given_) {
            Job& job = jobs_[passed_];
            double ready = job.given + s_.queue;
            if (!job.refused) {
                if (job.last_beat == kUnknown) return;
                ready = std::max(ready, job.last_beat + s_.queue);
                if (drains(job)) ready = std::max(ready, job.collected + s_.queue);
            }
            double before = 0;  // taken by the queue engine
            if (passed_ > 0) {
                ready = std::max(ready, jobs_[passed_ - 1].passed + 1);
                before = jobs_[passed_ - 1].done;
                // What continues a chain must not be written if the chain has failed.
                if (job.continues) ready = std::max(ready, before + 1);
            }
            if (ready == kUnknown) return;
            double sent = ready - 1, acknowledged = 0;
            if (!job.refused && job.demand.destination == kMemory && job.emptied == kUnknown) {
                double offer = ready + (s_.write_start + s_.line_queue);
                for (int64_t line = 0; line < job.demand.lines; ++line) {
                    const Channels::Written written = channels_.write_line(job.demand.result_line + line, offer);
                    job.read_out = offer - (1 + s_.line_queue);
                    job.emptied = written.taken;
                    job.acknowledged = std::max(job.acknowledged + 1, written.stored + s_.write_return);
                    offer = written.taken + 1;
                }
            }
            if (job.emptied != kUnknown) {
                sent = job.emptied - s_.line_queue;
                acknowledged = job.acknowledged;
            }
            if (before == kUnknown) return;
            job.passed = std::max(sent + 1, before);
            job.completed = std::max(job.passed + s_.retire, acknowledged + s_.write_end);
            ++passed_;
        }
    }

    struct Return {
        double cycle;
        int64_t stripes;
    };
    struct Freed {
        int64_t end, stripes;  // stripes freed so far; stripes of a group
        double last, period;   // cycle of the last; cycles from one group's to the next
        double step;           // cycles from one stripe of a group to the next
    };
    // Events that are evenly spaced from `first` to `last`.
    static double spaced(double first, double last, int64_t index, int64_t count) {
        return count > 1 ? first + (last - first) * index / (count - 1) : first;
    }

    struct Words {
        double first, last;  // cycles with the first and the last on the bus
        int64_t words;
        double at(int64_t index) const { return spaced(first, last, index, words); }
    };
    struct Piece {
        double first, last;  // cycles in which the first and the last stripe count
        int64_t beats;
        bool ends_in_scales;
        double at(int64_t index) const { return spaced(first, last, index, beats); }
    };

    static constexpr int64_t kResultHalves = 2;
    static constexpr int64_t kStages = 3;       // of a beat: issued, moved on, accepted by the array
    static constexpr int64_t kScaleStages = 3;  // of `Demand::rescale_cycles` at most
    static constexpr int64_t kGoesOn = -1;      // in place of a pause: the sum goes on
    static constexpr int64_t kWindow = 256;     // more than any unit looks back

    const Settings& s_;
    Channels& channels_;
    const int64_t longest_;  // words of a weight burst
    bool changed_ = false;
    double next_ = kUnknown;

    Recent<Job, kWindow> jobs_;
    Recent<int64_t, kWindow> work_, halves_;  // numbers of the jobs with work, and of those that write results
    int64_t accepted_ = 0, given_ = 0, passed_ = 0, retired_ = 0;
    int64_t work_given_ = 0, weights_taken_ = 0, work_ended_ = 0, memory_jobs_ = 0;
    double decoder_free_ = 0;

    Job *operand_job_ = nullptr, *weight_job_ = nullptr;  // being read
    int64_t operand_left_ = 0, operand_address_ = 0, weight_left_ = 0, weight_address_ = 0, group_ = 0, group_left_ = 0;
    double operand_offer_ = kUnknown, operand_idle_ = 0, weight_offer_ = kUnknown, weight_idle_ = 0;
    double broadcast_free_ = 0;
    int64_t bursts_ = 0, bursts_read_ = 0, asked_ = 0;  // bursts taken by the broadcast, and those of them on the bus
    std::deque<Burst> offered_;                         // between the two
    double request_ = kUnknown;         // of the oldest of these on the bus, once it was asked for
    int64_t requests_in_a_row_ = 0;     // up to that one
    Recent<double, kWindow> requests_;  // cycles in which all channels have taken them
    Recent<Words, kWindow> spans_;      // their words on the bus
    int64_t words_read_ = 0;            // of them, so far
    std::deque<Piece> pieces_;
    std::deque<Freed> freed_;
    int64_t freed_count_ = 0;

    int64_t space_, share_, resident_ = 0;  // stripes of the input buffer: free; of the operand in use
    std::deque<Return> returns_;

    // Last beat: issued, moved on, its weights read, accepted by the array; from when the row merge takes the end of a
    // sum. The last beats of scaled terms: their weights read, the latest last.
    double issue_ = -1, move_ = -1, read_ = -1, array_ = -1, merge_free_ = -1;
    std::array<double, kScaleStages> reads_{-1, -1, -1};
    // What was kept last, and the softmax terms before it, are in the output buffer.
    double kept_ = -1, previous_ = -1;
    double behind_scores_ = -1;  // from when a beat may complete results that pass no softmax unit
};
