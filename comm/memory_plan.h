/*
Whether what a model takes fits into the memory of a rank, and which micro-batch would.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "comm/memory.h"             // MemoryClass, available_memory
#include "comm/pipeline_schedule.h"  // PipelineShape
#include "data/error.h"

class MemoryPlan {
public:
    // Bytes of each class with B sequences in a micro-batch and so many micro-batches in a step.
    using Classes = std::function<std::vector<MemoryClass>(int B, int micro_batches)>;

    // T: tokens of a sequence.
    MemoryPlan(int B, int T, const PipelineShape& pipeline, bool training, size_t available, Classes classes)
        : B_(B),
          T_(T),
          pipeline_(pipeline),
          training_(training),
          available_(available),
          classes_of_(std::move(classes)),
          classes_(classes_of_(B, pipeline.micro_batches)) {}

    // The largest micro-batch that fits; 0 if none does. A step of several stays as large as it is: smaller
    // ones are more, of which a pipeline may keep more.
    int largest_micro_batch() const {
        int step = pipeline_.micro_batches * B_;
        bool single = pipeline_.micro_batches == 1;
        // micro-batches come in multiples
        int round = pipeline_.schedule == PipelineSchedule::interleaved ? pipeline_.stages : 1;
        auto fits = [&](int B) {
            int micro_batches = single ? 1 : ceil_div(ceil_div(step, B), round) * round;
            return memory_total(classes_of_(B, micro_batches)) <= available_;
        };
        int most = 0, too_large = single ? INT_MAX / T_ : step / round + 1;
        while (too_large - most > 1) {
            int B = most + (too_large - most) / 2;
            (fits(B) ? most : too_large) = B;
        }
        while (!single && most > 0 && (step % (most * round) || !fits(most))) most--;
        return most;
    }

    // Refuses what does not fit.
    void check() const {
        size_t need = memory_total(classes_);
        if (need <= available_) return;
        if (int fits = largest_micro_batch()) {
            fail("--micro-batch %d: needs %s of memory and %s are free; --micro-batch %d fits%s", B_,
                 size_text(need).c_str(), size_text(available_).c_str(), fits,
                 training_ ? ", --recompute block saves more" : "");
        }
        fail("the model needs %s of memory and %s are free; %s", size_text(need).c_str(),
             size_text(available_).c_str(),
             training_ ? "choose a smaller --model, a shorter --sequence-length, --recompute block or "
                         "--async-save off, or cut it over more processes with --zero, --tp or --pp"
                       : "free some, or ask for less at once");
    }

    // `where`: " on each rank", say.
    void print(const char* where) const {
        printf("memory      ");
        for (const MemoryClass& part : classes_) printf(" %s %s,", part.name, size_text(part.bytes).c_str());
        printf(" %s in all%s\n             %s free and %s kept for libraries, enough for --micro-batch %d\n",
               size_text(memory_total(classes_)).c_str(), where, size_text(available_).c_str(),
               size_text(library_memory).c_str(), largest_micro_batch());
    }

private:
    int B_, T_;
    PipelineShape pipeline_;
    bool training_;
    size_t available_;
    Classes classes_of_;
    std::vector<MemoryClass> classes_;
};
