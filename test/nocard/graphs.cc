#include "test/nocard/graphs.h"

#include "test/nocard/device_memory.h"
#include "test/nocard/fault.h"

namespace nocard {

size_t Graph::add(const Operation& operation, int lane, const std::vector<size_t>& before) {
    GraphNode node = {operation, {}, lane, before};
    for (const Touched& touched : operation.touched)
        node.allocations.push_back(allocation_number(touched.address));
    nodes_.push_back(std::move(node));
    return nodes_.size() - 1;
}

std::vector<size_t> Graph::last() const {
    std::vector<bool> has_follower(nodes_.size());
    for (const GraphNode& node : nodes_)
        for (size_t other : node.before) has_follower[other] = true;
    std::vector<size_t> last;
    for (size_t i = 0; i < nodes_.size(); i++)
        if (!has_follower[i]) last.push_back(i);
    return last;
}

ItemPtr Graph::launch(int lane, const std::vector<ItemPtr>& before) const {
    std::vector<ItemPtr> items;
    for (const GraphNode& node : nodes_) {
        for (size_t i = 0; i < node.allocations.size(); i++) {
            const void* address = node.operation.touched[i].address;
            if (allocation_number(address) != node.allocations[i])
                fault("cudaGraphLaunch", text("%s uses memory at %p that was freed after the capture",
                                              node.operation.call.c_str(), address));
        }
        std::vector<ItemPtr> needed;
        for (size_t other : node.before) needed.push_back(items[other]);
        items.push_back(give(node.operation, node.lane, needed.empty() ? before : needed));
    }
    std::vector<ItemPtr> needed = before;
    for (size_t i : last()) needed.push_back(items[i]);
    return give_mark(lane, needed);
}

}  // namespace nocard
