/*
The processes that a suite of several ranks runs on: test/test_ranks_main.cu joins them before the first test.
*/
#pragma once

#include "comm/world.h"

inline const World* world_of_tests = nullptr;

inline const World& test_world() {
    return *world_of_tests;
}
