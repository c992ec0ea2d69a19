/*
Part of simt.cc: counts the reads and writes of device memory for tests.
*/
#pragma once

namespace simt {
namespace {

// The ranges that the calling host thread is in, outermost first.
thread_local std::vector<const char*> ranges;

std::string outermost_range() {
    return ranges.empty() ? "" : ranges.front();
}

bool counts_traffic = false;  // checked at each access

// Keeps for each byte of device memory the last launch that read it and the last that wrote it, so that each
// byte counts once per launch.
class TrafficCounter {
public:
    void start(bool now) {
        std::lock_guard lock(mutex_);
        counts_traffic = now;
        if (now && !read_) read_ = reserve_stamps(), written_ = reserve_stamps();
        by_range_.clear();
    }
    std::map<std::string, Traffic> take() {
        std::lock_guard lock(mutex_);
        return std::exchange(by_range_, {});
    }

    void begin(const std::string& range) {
        std::lock_guard lock(mutex_);
        now_ = &by_range_[range];
        now_->launches++;
        launch_++;
    }
    // Counts an access by the launch that began last.
    void note(size_t place, size_t bytes, Access access) {
        if (access != Access::write) now_->read += count(read_ + place, bytes);
        if (access != Access::read) now_->written += count(written_ + place, bytes);
    }
    void add(const std::string& range, const Traffic& traffic) {
        std::lock_guard lock(mutex_);
        if (counts_traffic) by_range_[range] += traffic;
    }

private:
    static uint32_t* reserve_stamps() {
        return (uint32_t*)reserve(device_memory.size() * sizeof(uint32_t), PROT_READ | PROT_WRITE).begin;
    }
    size_t count(uint32_t* stamps, size_t bytes) const {
        size_t first = 0;
        for (size_t i = 0; i < bytes; i++) first += std::exchange(stamps[i], launch_) != launch_;
        return first;
    }

    std::mutex mutex_;  // guards the totals; kernels run one at a time
    std::map<std::string, Traffic> by_range_;
    Traffic* now_ = nullptr;
    uint32_t *read_ = nullptr, *written_ = nullptr, launch_ = 0;
};

TrafficCounter& traffic_counter = *new TrafficCounter;  // streams may outlive other objects

}  // namespace

int push_range(const char* name) {
    ranges.push_back(name);
    return (int)ranges.size() - 1;
}

int pop_range() {
    ranges.pop_back();
    return (int)ranges.size();
}

void note_product(const Traffic& traffic) {
    traffic_counter.add(outermost_range(), traffic);
}

CountTraffic::CountTraffic() {
    traffic_counter.start(true);
}

CountTraffic::~CountTraffic() {
    traffic_counter.start(false);
}

std::map<std::string, Traffic> CountTraffic::take() {
    return traffic_counter.take();
}

}  // namespace simt
