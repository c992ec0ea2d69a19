#include "test/nocard/schedule.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "test/nocard/fault.h"

namespace nocard {

using Clock = std::chrono::steady_clock;

struct Item {
    std::string call;
    std::vector<Touched> touched;
    double seconds = 0;
    Advance advance;
    int lane = 0;
    uint64_t number = 0;  // in the order of the calls
    size_t left = 0;      // unfinished items before it
    std::vector<ItemPtr> followers;
    bool begun = false, done = false;
    double earliest = 0, started = 0, time = 0;  // by the card's clock; time: when it was done
};

namespace {

constexpr size_t most_unfinished = 2048;
constexpr auto patience = std::chrono::milliseconds(4);     // without calls, until the card works by itself
constexpr auto look_again = std::chrono::microseconds(50);  // interval of polling work that waits for others
constexpr uint64_t steps_of_question = 4;                   // the most items that a poll lets the card do

class Schedule {
public:
    ItemPtr add(ItemPtr item, const std::vector<ItemPtr>& before) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return unfinished_.size() < most_unfinished; });
        item->number = next_number_++;
        for (const ItemPtr& other : before) {
            if (!other) continue;
            item->earliest = std::max(item->earliest, other->time);
            if (other->done) continue;
            other->followers.push_back(item);
            item->left++;
        }
        unfinished_[item->number] = item;
        if (item->left == 0) ready_.push_back(item);
        touch();
        if (unfinished_.size() >= most_unfinished / 2) wake_.notify_one();
        if (!started_) {
            started_ = true;
            std::thread([this] { run(); }).detach();
        }
        return item;
    }

    bool done(const ItemPtr& item) {
        std::lock_guard lock(mutex_);
        return item->done;
    }

    double time(const ItemPtr& item) {
        std::lock_guard lock(mutex_);
        return item->time;
    }

    bool ask(const ItemPtr& item) {
        std::unique_lock lock(mutex_);
        if (item->done) return true;
        touch();
        allowed_ = in_order_ ? steps_of_question : draw_unlocked(steps_of_question + 1);
        uint64_t before = steps_;
        wake_.notify_one();
        // A loop that polls must not be faster than the card.
        changed_.wait_for(lock, look_again, [&] { return item->done || steps_ != before; });
        return item->done;
    }

    void wait(const std::function<bool()>& is_over) {
        std::unique_lock lock(mutex_);
        if (is_over()) return;
        waiting_++;
        wake_.notify_one();
        changed_.wait(lock, is_over);
        waiting_--;
        touch();
    }

    bool idle() const { return unfinished_.empty(); }

    std::string user_of(const char* begin, size_t bytes) {
        std::lock_guard lock(mutex_);
        for (auto& [number, item] : unfinished_) {
            for (const Touched& touched : item->touched) {
                auto* other = (const char*)touched.address;
                if (other < begin + bytes && begin < other + touched.bytes) return item->call;
            }
        }
        return "";
    }

    uint64_t draw(uint64_t below) {
        std::lock_guard lock(mutex_);
        return draw_unlocked(below);
    }

    void use_seed(uint64_t seed) {
        std::lock_guard lock(mutex_);
        random_.seed(seed);
        priorities_.clear();
    }

private:
    uint64_t draw_unlocked(uint64_t below) { return in_order_ ? 0 : random_() % below; }

    void touch() { last_call_ = Clock::now(); }

    static double now() {
        static const Clock::time_point start = Clock::now();
        return std::chrono::duration<double>(Clock::now() - start).count() + 1;
    }

    // The card's thread.
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            bool others = look_at_begun(lock);
            ItemPtr item = may_go_on() ? next() : nullptr;
            if (!item) {
                sleep(lock, others);
                continue;
            }
            if (allowed_ > 0) allowed_--;
            work_on(lock, item);
        }
    }

    bool may_go_on() const {
        return waiting_ > 0 || allowed_ > 0 || unfinished_.size() >= most_unfinished / 2 ||
               Clock::now() - last_call_ > patience;
    }

    void sleep(std::unique_lock<std::mutex>& lock, bool others) {
        if (others)
            wake_.wait_for(lock, look_again);
        else if (ready_.empty())
            wake_.wait_for(lock, patience);
        else
            wake_.wait_until(lock, last_call_ + patience + look_again);
    }

    // Polls everything that is begun and not done. Returns whether any of it is left.
    bool look_at_begun(std::unique_lock<std::mutex>& lock) {
        auto begun = begun_;
        for (const ItemPtr& item : begun) work_on(lock, item);
        return !begun_.empty();
    }

    void work_on(std::unique_lock<std::mutex>& lock, const ItemPtr& item) {
        if (!item->begun) item->started = std::max(item->earliest, now());
        lock.unlock();
        bool done = true;
        try {
            done = !item->advance || item->advance();
        } catch (const std::exception& error) {
            fault(item->call, error.what());
        }
        lock.lock();
        if (done) return finish(item);
        if (!item->begun) begun_.push_back(item);
        item->begun = true;
    }

    void finish(const ItemPtr& item) {
        item->done = true;
        item->time = std::max(item->started + item->seconds + least_seconds, now());
        item->advance = nullptr;
        if (item->begun) std::erase(begun_, item);
        unfinished_.erase(item->number);
        for (const ItemPtr& follower : std::exchange(item->followers, {})) {
            follower->earliest = std::max(follower->earliest, item->time);
            if (--follower->left == 0) ready_.push_back(follower);
        }
        steps_++;
        changed_.notify_all();
    }

    // Returns the ready item to do next, or null.
    ItemPtr next() {
        if (ready_.empty()) return nullptr;
        auto first = [&](const ItemPtr& a, const ItemPtr& b) {
            if (in_order_ || a->lane == b->lane) return a->number < b->number;
            return priority(a->lane) > priority(b->lane);
        };
        auto best = std::min_element(ready_.begin(), ready_.end(), first);
        ItemPtr item = *best;
        ready_.erase(best);
        constexpr uint64_t often = 16;
        if (draw_unlocked(often) == 1) priorities_[item->lane] = random_();
        return item;
    }

    uint64_t priority(int lane) {
        auto [place, is_new] = priorities_.try_emplace(lane, 0);
        if (is_new) place->second = random_();
        return place->second;
    }

    static constexpr double least_seconds = 1e-6;

    std::mutex mutex_;
    std::condition_variable wake_, changed_;
    std::map<uint64_t, ItemPtr> unfinished_;
    std::vector<ItemPtr> ready_, begun_;
    std::map<int, uint64_t> priorities_;
    std::mt19937_64 random_{seed_of_process()};
    const bool in_order_ = setting("NOCARD_SEED", 1) == 0;
    uint64_t next_number_ = 0, allowed_ = 0, steps_ = 0;
    int waiting_ = 0;
    Clock::time_point last_call_ = Clock::now();
    bool started_ = false;
};

// Never destroyed: its thread runs until the process ends.
Schedule& schedule() {
    static Schedule& schedule = *new Schedule;
    return schedule;
}

// ----------------------------------------------------------------------------
// host functions

thread_local bool calls_host_function = false;

struct HostCall {
    void (*function)(void*);
    void* data;
    std::shared_ptr<std::atomic<bool>> over;
};

// The one thread on which CUDA calls host functions, one after another.
class HostThread {
public:
    void call(HostCall call) {
        std::lock_guard lock(mutex_);
        calls_.push_back(std::move(call));
        wake_.notify_one();
        if (!started_) std::thread([this] { run(); }).detach();
        started_ = true;
    }

private:
    void run() {
        calls_host_function = true;
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return !calls_.empty(); });
            HostCall call = std::move(calls_.front());
            calls_.pop_front();
            lock.unlock();
            call.function(call.data);
            *call.over = true;
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<HostCall> calls_;
    bool started_ = false;
};

HostThread& host_thread() {
    static HostThread& thread = *new HostThread;
    return thread;
}

}  // namespace

// ----------------------------------------------------------------------------
// the interface

Operation at_once(std::string call, std::vector<Touched> touched, std::function<void()> work) {
    Operation operation;
    operation.call = std::move(call);
    operation.touched = std::move(touched);
    operation.begin = [work = std::move(work)] {
        return [work] {
            work();
            return true;
        };
    };
    return operation;
}

ItemPtr give(const Operation& operation, int lane, const std::vector<ItemPtr>& before) {
    auto item = std::make_shared<Item>();
    item->call = operation.call;
    item->touched = operation.touched;
    item->seconds = operation.seconds;
    item->advance = operation.begin();
    item->lane = lane;
    return schedule().add(std::move(item), before);
}

ItemPtr give_mark(int lane, const std::vector<ItemPtr>& before) {
    auto item = std::make_shared<Item>();
    item->lane = lane;
    return schedule().add(std::move(item), before);
}

bool is_done(const ItemPtr& item) {
    return schedule().done(item);
}

bool ask(const ItemPtr& item) {
    return schedule().ask(item);
}

void wait_for(const ItemPtr& item) {
    schedule().wait([&] { return item->done; });
}

void wait_for_all() {
    schedule().wait([] { return schedule().idle(); });
}

double time_done(const ItemPtr& item) {
    return schedule().time(item);
}

std::string user_of(const void* address, size_t bytes) {
    return schedule().user_of((const char*)address, bytes);
}

uint64_t draw(uint64_t below) {
    return schedule().draw(below);
}

void use_seed(uint64_t seed) {
    schedule().use_seed(seed);
}

bool in_host_function() {
    return calls_host_function;
}

Operation host_function(void (*function)(void*), void* data) {
    Operation operation;
    operation.call = "cudaLaunchHostFunc";
    operation.begin = [=]() -> Advance {
        auto over = std::make_shared<std::atomic<bool>>(false);
        return [=, asked = false]() mutable {
            if (!asked) host_thread().call({function, data, over});
            asked = true;
            return over->load();
        };
    };
    return operation;
}

}  // namespace nocard
