/*
Copies and memsets.

For host memory that is not pinned, CUDA leaves open when it is read and whether the call waits: such a copy
"might be synchronous". So the seed draws whether its bytes are read at the call or when the copy is carried
out, and whether a copy to the host has ended when the call returns. Calls that are synchronous by name do not
always wait either: a cudaMemcpy() from pageable memory may return once the bytes are read, and one within the
card's memory may return at once.
*/
#include <algorithm>
#include <cstring>
#include <cuda_runtime.h>
#include <memory>
#include <vector>

#include "test/nocard/device_memory.h"
#include "test/nocard/errors.h"
#include "test/nocard/fault.h"
#include "test/nocard/record.h"
#include "test/nocard/report.h"
#include "test/nocard/streams.h"

namespace nocard {
namespace {

// Copies `height` rows of `width` bytes, which begin to_pitch and from_pitch bytes apart.
struct Copy {
    std::string call;
    char* to;
    size_t to_pitch;
    const char* from;
    size_t from_pitch, width, height;
    cudaMemcpyKind kind;

    size_t extent(size_t pitch) const { return height ? pitch * (height - 1) + width : 0; }
    size_t bytes_to() const { return extent(to_pitch); }
    size_t bytes_from() const { return extent(from_pitch); }
    bool is_empty() const { return width == 0 || height == 0; }
    bool to_host() const { return kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost; }
    bool from_host() const { return kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost; }
};

cudaMemcpyKind known_kind(cudaMemcpyKind kind, const void* to, const void* from) {
    if (kind != cudaMemcpyDefault) return kind;
    bool to_device = memory_of(to) == Memory::device, from_device = memory_of(from) == Memory::device;
    if (to_device) return from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
    return from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

void check(const Copy& copy) {
    auto require = [&](bool host, const char* what, const void* address, size_t bytes) {
        host ? require_host(copy.call, what, address, bytes)
             : require_device(copy.call, what, address, bytes);
    };
    require(copy.to_host(), "the destination", copy.to, copy.bytes_to());
    require(copy.from_host(), "the source", copy.from, copy.bytes_from());
    bool overlap = copy.to < copy.from + copy.bytes_from() && copy.from < copy.to + copy.bytes_to();
    if (copy.height == 1 && overlap && copy.to != copy.from)
        fault(copy.call, text("%zu bytes from %p to %p: source and destination overlap", copy.width,
                              (void*)copy.from, (void*)copy.to));
}

void do_copy(const Copy& copy) {
    for (size_t row = 0; row < copy.height; row++) {
        char* to = copy.to + row * copy.to_pitch;
        const char* from = copy.from + row * copy.from_pitch;
        if (copy.to_host() && !copy.from_host()) require_written(copy.call, "the source", from, copy.width);
        memmove(to, from, copy.width);
        copy_written(to, from, copy.width);
    }
}

Operation operation_of(const Copy& copy, bool take_now) {
    std::vector<Touched> touched;
    if (memory_of(copy.to) != Memory::pageable) touched.push_back({copy.to, copy.bytes_to()});
    if (memory_of(copy.from) != Memory::pageable) touched.push_back({copy.from, copy.bytes_from()});
    if (!take_now) return at_once(copy.call, touched, [copy] { do_copy(copy); });
    auto taken = std::make_shared<std::vector<char>>(copy.from, copy.from + copy.bytes_from());
    return at_once(copy.call, touched, [copy = copy, taken]() mutable {
        copy.from = taken->data();
        do_copy(copy);
    });
}

cudaError_t start(const Copy& copy, cudaStream_t stream) {
    if (copy.width > std::min(copy.to_pitch, copy.from_pitch) && copy.height > 1)
        return noted(cudaErrorInvalidPitchValue);
    if (copy.is_empty()) return cudaSuccess;
    check(copy);
    report_work("copies");
    if (!copy.from_host() && !copy.to_host())
        record_outside_of_launchers(stream, text("copy %zu", copy.width * copy.height));
    bool capturing = is_capturing(stream);
    bool from_pageable = copy.from_host() && memory_of(copy.from) == Memory::pageable;
    bool to_pageable = copy.to_host() && memory_of(copy.to) == Memory::pageable;
    constexpr uint64_t seldom = 4;
    bool take_now = from_pageable && !capturing && draw(seldom) != 1;
    if (cudaError_t error = enqueue(stream, operation_of(copy, take_now))) return error;
    bool waits = (copy.from_host() && copy.to_host()) || (to_pageable && draw(seldom) != 1);
    return waits && !capturing ? synchronize(copy.call, stream) : cudaSuccess;
}

Copy row(const char* call, void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return {call, (char*)to, bytes, (const char*)from, bytes, bytes, 1, known_kind(kind, to, from)};
}

cudaError_t fill(const char* call, void* to, size_t pitch, int value, size_t width, size_t height,
                 cudaStream_t stream) {
    if (width > pitch && height > 1) return noted(cudaErrorInvalidPitchValue);
    if (width == 0 || height == 0) return cudaSuccess;
    size_t bytes = pitch * (height - 1) + width;
    require_reachable(call, "the destination", to, bytes);
    report_work("memsets");
    record_outside_of_launchers(stream, text("fill %zu", width * height));
    return enqueue(stream, at_once(call, {{to, bytes}}, [=] {
                       for (size_t row = 0; row < height; row++) {
                           memset((char*)to + row * pitch, value, width);
                           note_written((char*)to + row * pitch, width);
                       }
                   }));
}

}  // namespace
}  // namespace nocard

using namespace nocard;

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return start(row("cudaMemcpyAsync", to, from, bytes, kind), stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    // CUDA checks the pitches of a single row, too.
    constexpr size_t most_pitch = 2147483647;
    if (width > std::min(to_pitch, from_pitch) || std::max(to_pitch, from_pitch) > most_pitch)
        return noted(cudaErrorInvalidPitchValue);
    return start({"cudaMemcpy2DAsync", (char*)to, to_pitch, (const char*)from, from_pitch, width, height,
                  known_kind(kind, to, from)},
                 stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    require_outside_of_host_function("cudaMemcpy");
    if (cudaError_t error = refused_by_capture()) return noted(error);
    Copy copy = row("cudaMemcpy", to, from, bytes, kind);
    if (copy.is_empty()) return cudaSuccess;
    check(copy);
    report_work("copies");
    bool take_now = copy.from_host() && memory_of(from) == Memory::pageable;
    if (cudaError_t error = enqueue(nullptr, operation_of(copy, take_now))) return error;
    bool returns_early = take_now || copy.kind == cudaMemcpyDeviceToDevice;
    return returns_early && draw(2) ? cudaSuccess : synchronize("cudaMemcpy", nullptr);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    return fill("cudaMemsetAsync", to, bytes, value, bytes, 1, stream);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    return fill("cudaMemset", to, bytes, value, bytes, 1, nullptr);
}

cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
    return fill("cudaMemset2DAsync", to, pitch, value, width, height, stream);
}
}
