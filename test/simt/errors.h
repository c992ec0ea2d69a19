/*
For tests of the simulated device: the errors that a kernel causes.
*/
#pragma once

#include "test/support/testing.h"

// Runs a kernel and returns the errors that it causes.
template <typename... Parameters, typename... Arguments>
std::vector<simt::Error> errors_of(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                                   Arguments... arguments) {
    simt::Errors errors;
    launch(kernel, grid, block, shared, test_stream(), arguments...);
    cudaCheck(cudaStreamSynchronize(test_stream()));
    return errors.take();
}

// Checks that there is one error of this kind, whose text contains all of these parts.
inline void check_one(const std::vector<simt::Error>& errors, simt::Kind kind,
                      std::vector<std::string> parts) {
    REQUIRE(errors.size() == 1);
    INFO(errors[0].text);
    CHECK(errors[0].kind == kind);
    CHECK(errors[0].text.find('\n') == std::string::npos);
    for (const auto& part : parts) CHECK_MESSAGE(errors[0].text.find(part) != std::string::npos, part);
}
