// libFuzzer: whatever a record in shared memory or a line of an agent says, it gives no states of ranks, or
// states in which a culprit can be looked for.
#include <cstdlib>
#include <cstring>
#include <string>

#include "data/run/culprit.h"
#include "test/fuzz/fuzz_json.h"

// The record of one of four ranks, with some bytes overwritten by the fuzzer: three of its bytes say where,
// the fourth gives the value and the number of bytes.
static FlightRecord& damaged_record(std::string_view bytes) {
    static FlightRecord& record = *new FlightRecord;
    memset((void*)&record, 0, sizeof record);
    record.process = 1, record.rank = 1, record.ranks = 4;
    record.sizes = {{2, 1, 1, 2}};
    record.group_count = 2, record.entry_count = 3;
    for (int i = 0; i < 2; i++) {
        FlightGroup& group = record.groups[i];
        copy_name(group.name, i ? "forward 0>2" : "tp");
        group.size = 2, group.axes = i ? 0 : 1;
        group.ranks[1] = 1;
        group.issued = 3, group.begun = 2, group.done = 1;
    }
    record.entries[0] = {
        .begin = 1, .number = 2, .group = 0, .operation = Operation::all_reduce, .timed = true};
    record.entries[1] = {.begin = 1, .operation = Operation::forward};
    record.entries[2] = {.begin = 1, .number = 2, .group = 1, .operation = Operation::receive, .timed = true};
    const size_t numbers = offsetof(FlightRecord, entries) + 4 * sizeof(FlightEntry);
    for (; bytes.size() >= 4; bytes.remove_prefix(4)) {
        size_t at = ((uint8_t)bytes[0] * 65536u + (uint8_t)bytes[1] * 256u + (uint8_t)bytes[2]) % numbers;
        const uint8_t value = (uint8_t)bytes[3];
        memset((char*)&record + at, value, value % 8 + 1);
    }
    return record;
}

static std::string damaged_line(std::string_view bytes) {
    static const nlohmann::json sound = [] {
        RankState state = state_of(damaged_record(""));
        return nlohmann::json{{"agent", "a"}, {"time", 1.5}, {"ranks", {state, state}}};
    }();
    nlohmann::json line = sound;
    damage_json(line, bytes);
    return line.dump();
}

static int test_one_input(const uint8_t* data, size_t size) {
    if (size < 4) return 0;
    const std::string_view bytes((const char*)data + 1, size - 1);
    std::vector<RankState> states;
    if (data[0] & 1)
        states = states_in_line(data[0] & 2 ? damaged_line(bytes) : std::string(bytes));
    else if (RankState state = state_of(damaged_record(bytes)); is_possible(state))
        states.push_back(state);
    for (bool known : {true, false})
        if (diagnose_hang(states, 0.5, known).sentence.empty()) abort();
    // Written as a line, they can all be read again.
    if (!states.empty() &&
        states_in_line(json_line(nlohmann::json{{"ranks", states}})).size() != states.size())
        abort();
    return 0;
}
