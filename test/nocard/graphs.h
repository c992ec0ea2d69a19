/*
Graphs: the work of captured streams, and what each piece of it waits for.
*/
#pragma once

#include <memory>
#include <vector>

#include "test/nocard/schedule.h"

namespace nocard {

struct GraphNode {
    Operation operation;
    std::vector<uint64_t> allocations;  // numbers of those that the operation touches
    int lane;
    std::vector<size_t> before;  // the earlier nodes of the list that it waits for
};

class Graph {
public:
    // Returns the number of the new node.
    size_t add(const Operation& operation, int lane, const std::vector<size_t>& before);

    size_t size() const { return nodes_.size(); }

    // Returns the nodes that no other node waits for.
    std::vector<size_t> last() const;

    // Gives all nodes to the card, to start when `before` is done. Returns a mark that is reached when all
    // are done.
    ItemPtr launch(int lane, const std::vector<ItemPtr>& before) const;

private:
    std::vector<GraphNode> nodes_;
};

}  // namespace nocard
