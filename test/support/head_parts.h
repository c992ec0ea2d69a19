/*
The parts of the heads that context ranks send (head_parts() in comm/stage.h), in tests.
*/
#pragma once

#include <cstddef>
#include <utility>

#include "comm/stage.h"  // least_queries_of_part

// During its lifetime, parts have at least this number of queries. 1: the largest number of parts, although
// sequences are short.
struct HeadParts {
    const size_t before;

    explicit HeadParts(size_t queries) : before(std::exchange(least_queries_of_part, queries)) {}
    ~HeadParts() { least_queries_of_part = before; }
};
