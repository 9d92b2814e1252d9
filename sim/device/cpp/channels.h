// All memory channels: bursts that read every channel alike, and single lines in between.
//
// Channels answer reads in the order in which they took them. A burst of the core goes to all of them, and
// its words count when the slowest channel has delivered; a line of the queue engine or of the host holds up
// its own channel by a word, as does a line that is written while the channel streams (a channel's data bus moves
// one word a cycle in one direction, and reads and writes take turns). `lag_` keeps by how much a channel is
// behind the others; idle time makes it up.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <vector>

#include "constants.h"

class Channels {
  public:
    explicit Channels(const Settings& s) : s_(s), lag_(static_cast<size_t>(s.channels), 0.0) {}

    struct Span {
        double first, last;
    };
    struct Written {
        double taken, stored;  // by the port; in memory
    };

    // Reads `words` words of every channel from cycle `request` on: cycles of the first and last stripe.
    Span read_all(double request, int64_t words) {
        words_read += words * s_.channels;
        const double start = request + s_.read_latency + s_.read_return;
        if (start > free_) {
            const double idle = start - free_;
            if (behind_) {
                behind_ = false;
                for (double& lag : lag_) {
                    lag = std::max(0.0, lag - idle);
                    behind_ |= lag > 0;
                }
            }
            // While some channel is still busy what it has waited so far still counts.
            if (behind_) {
                origin_ += idle;
            } else {
                origin_ = start;
                events_ = 1;
            }
        }
        const int64_t before = events_;
        events_ += words;
        Span span{origin_ + (before - 1) * s_.beat_cycles + waited(before + 1),
                  origin_ + (events_ - 2) * s_.beat_cycles + waited(events_)};
        free_ = span.last + s_.beat_cycles;
        double lag = behind_ ? *std::max_element(lag_.begin(), lag_.end()) : 0;
        span.first += lag;
        // Lines that are known to be written while these words come.
        while (!writes_.empty() && writes_.front().cycle < span.last + lag) {
            if (writes_.front().cycle >= span.first) {
                double& own = lag_[static_cast<size_t>(writes_.front().line % s_.channels)];
                own += s_.beat_cycles;
                lag = std::max(lag, own);
                behind_ = true;
            }
            writes_.pop_front();
        }
        span.last += lag;
        return span;
    }

    // Reads one line from cycle `request` on: cycle in which it arrives.
    double read_line(int64_t line, double request) {
        ++words_read;
        double& lag = lag_[static_cast<size_t>(line % s_.channels)];
        const double asked = request + s_.wait_one + s_.read_latency + s_.read_return;
        const double arrival = std::max(asked, free_ + lag) + s_.wait_one;
        lag = arrival + s_.beat_cycles - free_;
        behind_ = true;
        return arrival;
    }

    // Writes one line, offered in cycle `offer`. Its acknowledgement is on the bus `write_return` cycles after
    // it is in memory.
    Written write_line(int64_t line, double offer) {
        ++words_written;
        const double taken = offer + s_.wait_pair, read_missed = taken + 1;
        double& lag = lag_[static_cast<size_t>(line % s_.channels)];
        if (read_missed >= free_ + lag) {
            // What is read then is not known yet.
            auto place = writes_.end();
            while (place != writes_.begin() && std::prev(place)->cycle > read_missed) --place;
            writes_.insert(place, {read_missed, line});
        } else if (read_missed >= origin_) {
            lag += s_.beat_cycles;
            behind_ = true;
        }
        return {taken, taken + s_.write_latency + s_.wait_one};
    }

    // Expected wait of the slowest channel in `events` events.
    double waited(int64_t events) const {
        if (events <= s_.waits_known) return s_.waits[events];
        const double n = events;
        return n * s_.wait_mean + s_.wait_spread * std::sqrt(n);
    }

    int64_t words_read = 0, words_written = 0;

  private:
    const Settings& s_;
    double free_ = 0;        // cycle after the last word that the common stream has on the bus
    double origin_ = 0;      // first word since the stream was idle last
    int64_t events_ = 0;     // words, and the address, since then
    std::vector<double> lag_;
    bool behind_ = false;    // some lag is not zero
    struct Write {
        double cycle;  // in which a read word would have been on the bus
        int64_t line;
    };
    std::deque<Write> writes_;  // after all reads so far, in order
};
