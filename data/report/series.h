/*
A curve of any number of points in bounded memory, for a plot a few hundred pixels wide. Adjacent points share
a bucket, which keeps their minimum, maximum and mean, so a spike of one step in a million stays visible. A
bucket spans a power of two steps; when there are too many buckets, each spans twice as many steps and
neighbors are merged. The length of the curve need not be known in advance.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

class Series {
public:
    static constexpr size_t most_buckets = 1000;  // each is drawn from its minimum to its maximum
    static constexpr size_t most_named = 200;     // limit on the steps that are listed as not finite

    struct Bucket {
        int64_t first;     // step of the first point in it
        double low, high;  // bounds of the points
        double sum;
        uint64_t count;
        int who = -1;  // the owner of the maximum, such as a rank; -1: none

        double mean() const { return sum / (double)count; }
    };

    void add(int64_t step, double value) { add(step, value, value, value); }

    // Adds a point that is itself a range, such as the step times of many ranks. Steps need not increase.
    void add(int64_t step, double low, double middle, double high, int who = -1) {
        if (!std::isfinite(low) || !std::isfinite(middle) || !std::isfinite(high)) {
            if (not_finite_++ < most_named) without_number_.push_back(step);
            return;
        }
        points_++;
        last_ = middle;
        last_step_ = step;
        merge(Bucket{step, low, high, middle, 1, who});
        while (buckets_.size() > most_buckets) widen();
    }

    const std::vector<Bucket>& buckets() const { return buckets_; }
    int64_t width() const { return width_; }  // steps that a bucket spans
    uint64_t points() const { return points_; }
    double last() const { return last_; }
    int64_t last_step() const { return last_step_; }

    // Points that are not finite: their number, and the steps of the first ones.
    uint64_t not_finite() const { return not_finite_; }
    const std::vector<int64_t>& without_number() const { return without_number_; }

private:
    int64_t place_of(int64_t step) const { return step / width_; }

    static void unite(Bucket& into, const Bucket& other) {
        into.first = std::min(into.first, other.first);
        into.low = std::min(into.low, other.low);
        if (other.high > into.high) into.high = other.high, into.who = other.who;
        into.sum += other.sum;
        into.count += other.count;
    }

    void merge(const Bucket& bucket) {
        auto at = std::lower_bound(buckets_.begin(), buckets_.end(), place_of(bucket.first),
                                   [&](const Bucket& b, int64_t place) { return place_of(b.first) < place; });
        if (at != buckets_.end() && place_of(at->first) == place_of(bucket.first))
            unite(*at, bucket);
        else
            buckets_.insert(at, bucket);
    }

    void widen() {
        width_ *= 2;
        std::vector<Bucket> narrow = std::exchange(buckets_, {});
        for (const Bucket& bucket : narrow) {
            if (!buckets_.empty() && place_of(buckets_.back().first) == place_of(bucket.first))
                unite(buckets_.back(), bucket);
            else
                buckets_.push_back(bucket);
        }
    }

    std::vector<Bucket> buckets_;  // by step
    int64_t width_ = 1;
    uint64_t points_ = 0, not_finite_ = 0;
    double last_ = NAN;
    int64_t last_step_ = 0;
    std::vector<int64_t> without_number_;
};

// The last items of an unbounded list, and the total number of items.
template <typename Item>
class LastOf {
public:
    explicit LastOf(size_t most) : most_(most) {}

    void add(Item item) {
        count_++;
        items_.push_back(std::move(item));
        if (items_.size() > most_) items_.pop_front();
    }

    const std::deque<Item>& items() const { return items_; }
    uint64_t count() const { return count_; }

private:
    size_t most_;
    uint64_t count_ = 0;
    std::deque<Item> items_;
};

// The first item of an unbounded list, the last one, and some evenly spaced ones in between.
template <typename Item>
class SpreadOf {
public:
    explicit SpreadOf(size_t most) : most_(most) {}

    void add(Item item) {
        if (last_is_extra_) items_.pop_back();
        last_is_extra_ = count_++ % stride_ != 0;
        items_.push_back(std::move(item));
        if (items_.size() <= most_) return;
        std::vector<Item> kept;
        for (size_t i = 0; i < items_.size(); i++) {
            if (i % 2 == 0 || i + 1 == items_.size()) kept.push_back(std::move(items_[i]));
        }
        stride_ *= 2;
        last_is_extra_ = (count_ - 1) % stride_ != 0;
        items_ = std::move(kept);
    }

    const std::vector<Item>& items() const { return items_; }
    uint64_t count() const { return count_; }

private:
    size_t most_;
    uint64_t count_ = 0, stride_ = 1;
    bool last_is_extra_ = false;
    std::vector<Item> items_;
};
