/*
Makes a call of the control plane (comm/control_plane.h) `TIMES` times on all ranks, for
test/scripts/check_scale.sh, which has Open MPI count the messages sent meanwhile, including those of its
collectives.

    count_messages CALL TIMES
*/
#include <functional>
#include <map>

#include "comm/watchdog.h"
#include "comm/world.h"

namespace {

// Called on all ranks.
void make_calls(const World& world, const std::string& name, int times) {
    int n = world.size(), me = world.rank();
    std::string text = "from " + std::to_string(me), number(sizeof(int), '\0');
    std::vector<std::string_view> to_next((size_t)n);  // each rank writes to the next one
    to_next[(size_t)((me + 1) % n)] = text;
    const std::map<std::string, std::function<void()>> calls = {
        {"broadcast", [&] { world.broadcast(number.data(), number.size()); }},
        {"broadcast_text", [&] { world.broadcast_text(text); }},
        {"gather", [&] { world.gather(text); }},
        {"all_gather", [&] { world.all_gather(text); }},
        {"agree", [&] { world.agree(text, [](auto& texts) { return texts[0]; }); }},
        {"exchange", [&] { world.exchange(to_next); }},
        {"largest", [&] { world.largest(me); }},
        {"barrier", [&] { world.barrier(); }}};
    auto call = calls.find(name);
    if (call == calls.end()) fail("%s: no such call", name.c_str());
    for (int i = 0; i < times; i++) call->second();
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 3) fail("usage: count_messages CALL TIMES");
    World world(&argc, &argv, watch_ranks);
    or_abort(world, [&] { make_calls(world, argv[1], atoi(argv[2])); });
    return 0;
} catch (const std::exception& error) {
    fprintf(stderr, "count_messages: %s\n", error.what());
    return 1;
}
