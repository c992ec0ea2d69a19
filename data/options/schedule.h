/*
The course of the learning rate: warm-up, then one of several ways down.
*/
#pragma once

#include <algorithm>
#include <cmath>

#include "data/options/options.h"

// The rate of step `step` of `steps` (from 0), as a share of the peak. Warm-up rises linearly to 1; the last
// step runs at the final rate exactly.
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
