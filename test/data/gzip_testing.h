// Compressed text for tests, made by zlib.
#pragma once

#include <cstdlib>
#include <string>

#include <zlib.h>

inline std::string gzip(const std::string& text, int level = 6) {
    z_stream stream = {};
    constexpr int gzip_form = 16 + MAX_WBITS;
    if (deflateInit2(&stream, level, Z_DEFLATED, gzip_form, 8, Z_DEFAULT_STRATEGY) != Z_OK) abort();
    std::string out(deflateBound(&stream, text.size()) + 64, '\0');
    stream.next_in = (Bytef*)text.data(), stream.avail_in = (uInt)text.size();
    stream.next_out = (Bytef*)out.data(), stream.avail_out = (uInt)out.size();
    if (deflate(&stream, Z_FINISH) != Z_STREAM_END) abort();
    out.resize(stream.total_out);
    deflateEnd(&stream);
    return out;
}
