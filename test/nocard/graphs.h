/*
Graphs: the work of streams that were captured, and what each piece of it waits for.
*/
#pragma once

#include <memory>
#include <vector>

#include "test/nocard/schedule.h"

namespace nocard {

struct GraphNode {
    Operation operation;
    std::vector<uint64_t> allocations;  // the numbers of those that the operation touches
    int lane;
    std::vector<size_t> before;  // nodes that come earlier in the list
};

class Graph {
public:
    // Returns the number of the new node.
    size_t add(const Operation& operation, int lane, const std::vector<size_t>& before);

    size_t size() const { return nodes_.size(); }

    // The nodes that none waits for.
    std::vector<size_t> last() const;

    // Gives all of it to the card, when `before` is done. Returns the mark that all of it is done.
    ItemPtr launch(int lane, const std::vector<ItemPtr>& before) const;

private:
    std::vector<GraphNode> nodes_;
};

}  // namespace nocard
