// A weights file with any header and data, and right checksums: damage that only a careful reader finds.
#pragma once

#include <string>

#include "data/weights_file.h"

inline std::string forged_weights(std::string header, const std::string& data) {
    using namespace weights_format;
    header.resize(aligned(header.size()), ' ');
    Preamble preamble = {};
    memcpy(preamble.magic, magic, sizeof magic);
    preamble.version = version;
    preamble.header_bytes = header.size();
    preamble.header_hash = XXH3_64bits(header.data(), header.size());
    preamble.data_bytes = data.size();
    preamble.data_hash = XXH3_64bits(data.data(), data.size());
    return std::string((const char*)&preamble, sizeof preamble) + header + data;
}
