/*
The schedules of the learning rate (a warm-up, then one of several decays) and of the batch size, which may
grow (--batch-ramp).
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "data/base/error.h"       // fail
#include "data/base/strings.h"     // printable
#include "data/options/options.h"  // Options
#include "data/options/values.h"   // read_number

// The learning rate of a step (counted from 0), as a fraction of the peak. It rises linearly to 1 during
// warm-up; the last step runs at exactly the final rate, except with a constant schedule.
inline float schedule(const Options& o, int step) {
    if (step < o.warmup_steps) return (float)(step + 1) / o.warmup_steps;
    float last = o.final_learning_rate;
    float progress = (float)(step + 1 - o.warmup_steps) / (o.steps - o.warmup_steps);  // (0, 1]
    switch (o.schedule) {
    case LearningRateSchedule::cosine:
        return last + (1 - last) * 0.5f * (1 + std::cos((float)M_PI * progress));
    case LearningRateSchedule::linear:
        return 1 - (1 - last) * progress;
    case LearningRateSchedule::constant:
        return 1;
    case LearningRateSchedule::wsd:
        break;
    }
    float length = std::clamp(o.decay_fraction * o.steps, 1.0f, (float)(o.steps - o.warmup_steps));
    float decay = (float)(o.steps - 1 - step) / length;  // 1 .. 0 while decaying
    return decay >= 1 ? 1 : last + (1 - last) * decay;
}

// ----------------------------------------------------------------------------
// tokens of a step
//
// The batch grows in multiples of its first size, whatever the layout, so a run that resumes in another
// layout uses the same samples in the same steps. For example, 256k:1M:2000 means
//
//     steps      1 .. 667    .. 1334    .. 2000    after
//     tokens     256k        512k       768k       1M

struct BatchRamp {
    long long first, last;  // tokens; last is a multiple of first
    long long steps;        // before the last size is reached

    long long levels() const { return last / first; }
    // The first step of a level; both are counted from 0.
    long long begin(long long level) const { return (steps * level + levels() - 2) / (levels() - 1); }
    long long level(long long step) const { return std::min(levels() - 1, step * (levels() - 1) / steps); }
};

// Parses START:END:STEPS. Refuses anything else.
inline BatchRamp parse_batch_ramp(const std::string& source) {
    auto refuse = [&](const char* reason) {
        fail("--batch-ramp %s: %s; give the tokens per step at the start and at the end, and the "
             "number of steps of the ramp, as in 256k:1M:2000",
             printable(source).c_str(), reason);
    };
    auto number = [&](const char* option, size_t begin, size_t end) {
        long long value = 0;
        std::string part = source.substr(begin, end - begin);
        std::string wrong = read_number(find_option(option)->limits.suffixes, part, value);
        if (!wrong.empty()) refuse(((part.empty() ? "''" : printable(part)) + " is " + wrong).c_str());
        return value;
    };
    size_t first = source.find(':'), second = source.find(':', first + 1);
    if (second == std::string::npos) refuse("not three numbers");
    BatchRamp ramp = {number("--global-batch", 0, first), number("--global-batch", first + 1, second),
                      number("--steps", second + 1, source.size())};
    if (ramp.first < 1) refuse("it begins with less than one token");
    if (ramp.last <= ramp.first || ramp.last % ramp.first)
        refuse("the end is not 2, 3, 4 ... times the start");
    if (ramp.steps < ramp.levels() - 1 || ramp.steps > 1'000'000'000)
        refuse("it has fewer steps than batch sizes, or more than a billion");
    return ramp;
}

// A range of steps of a run, counted from 1.
struct StepRange {
    int first, last;
};

// Parses FIRST:LAST, or one step. Refuses anything else.
inline StepRange parse_step_range(const char* option, const std::string& source) {
    StepRange range = {0, 0};
    int length = 0;
    bool two = sscanf(source.c_str(), "%9d:%9d%n", &range.first, &range.last, &length) == 2;
    if (!two && sscanf(source.c_str(), "%9d%n", &range.first, &length) == 1) range.last = range.first;
    if ((size_t)length != source.size() || range.first < 1 || range.last < range.first) {
        fail("%s %s: not a range of steps; give the first and the last, counted from 1, as in 100:103",
             option, printable(source).c_str());
    }
    return range;
}

// The tokens of a step, counted from 0.
inline long long tokens_of_step(const Options& o, int step) {
    if (o.batch_ramp.empty()) return o.global_batch;
    BatchRamp ramp = parse_batch_ramp(o.batch_ramp);
    return ramp.first * (1 + ramp.level(step));
}

// Returns whether the batch size differs from that of the previous step.
inline bool batch_changes(const Options& o, int step) {
    return step > 0 && tokens_of_step(o, step) != tokens_of_step(o, step - 1);
}

// Tokens of the first `steps` steps.
inline long long tokens_until(const Options& o, long long steps) {
    if (o.batch_ramp.empty() || steps == 0) return steps * o.global_batch;
    BatchRamp ramp = parse_batch_ramp(o.batch_ramp);
    long long tokens = 0, last = ramp.level(steps - 1);
    for (long long level = 0; level <= last; level++) {
        long long end = level < last ? ramp.begin(level + 1) : steps;
        tokens += (end - ramp.begin(level)) * ramp.first * (level + 1);
    }
    return tokens;
}
