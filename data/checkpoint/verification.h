/*
Verifies that a checkpoint is as it was written: reads every byte and compares the checksums.
*/
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/checkpoint/folder.h"
#include "data/base/error.h"
#include "data/base/ordered_work.h"
#include "data/base/terminal.h"

// Returns the names in a checkpoint's folder that do not belong to the checkpoint, sorted.
inline std::vector<std::string> stray_names(const CheckpointReader& reader) {
    std::set<std::string> known = {"index.bin"}, strays;
    for (size_t number = 0; number < reader.index().file_bytes.size(); number++)
        known.insert(data_file_name((int)number));
    std::error_code error;
    std::filesystem::directory_iterator entry(reader.folder(), error), end;
    for (; !error && entry != end; entry.increment(error)) {
        std::string name = entry->path().filename();
        if (!known.contains(name)) strays.insert(name);
    }
    if (error) fail_with_code(error, reader.folder(), "list it");
    return {strays.begin(), strays.end()};
}

// Reads every byte, with one thread per core. Calls report(line) for each damaged data file and piece, and
// for each file that does not belong to the checkpoint; fails if there are any.
template <typename Report>
void verify_checkpoint(const CheckpointReader& reader, Report&& report) {
    const CheckpointIndex& index = reader.index();
    size_t files = index.file_bytes.size(), damaged_files = 0, damaged_pieces = 0;
    std::vector<bool> whole(files);
    for (uint32_t number = 0; number < files; number++) {
        std::string error;
        note_error(error, [&] { reader.check_file(number); });
        whole[number] = error.empty();
        if (!whole[number]) damaged_files++, report(error);
    }

    uint64_t bytes = 0;
    std::vector<uint32_t> order;
    for (uint32_t p :
         index.sorted_by([](const CheckpointPiece& piece) { return std::tuple(piece.file, piece.offset); })) {
        if (whole[index.pieces[p].file]) {
            order.push_back(p);
            bytes += index.bytes_of(index.pieces[p]);
        } else {
            damaged_pieces++;
        }
    }
    struct Verdict {
        uint64_t bytes;
        std::string error;
    };
    auto next = [&, at = (size_t)0](const CheckpointPiece*& piece) mutable {
        if (at == order.size()) return false;
        piece = &index.pieces[order[at++]];
        return true;
    };
    auto verify = [&](const CheckpointPiece* piece) {
        thread_local std::vector<char> data;
        Verdict verdict = {index.bytes_of(*piece), ""};
        data.resize(verdict.bytes);
        note_error(verdict.error, [&] { reader.read(*piece, data.data()); });
        return verdict;
    };
    ProgressLine progress("verify", (double)bytes);
    OrderedWork<const CheckpointPiece*, Verdict> work(next, verify, std::thread::hardware_concurrency());
    for (Verdict verdict; work.take(verdict);) {
        progress.add((double)verdict.bytes);
        if (verdict.error.empty()) continue;
        damaged_pieces++;
        progress.clear();
        report(verdict.error);
    }
    progress.clear();
    std::vector<std::string> strays = stray_names(reader);
    for (const std::string& name : strays)
        report(text("%s/%s: does not belong to this checkpoint; remove it", reader.folder().c_str(),
                    visible_text(name).c_str()));
    bool damaged = damaged_files + damaged_pieces > 0;
    if (!damaged && strays.empty()) return;
    std::string error = text("%zu of %zu pieces are damaged", damaged_pieces, index.pieces.size());
    if (damaged_files > 0) error += text(", %zu of %zu data files are unusable", damaged_files, files);
    if (!strays.empty()) error += text(", and files that do not belong to it: %zu", strays.size());
    fail("%s: %s; %s", reader.folder().c_str(), error.c_str(),
         damaged ? "use another checkpoint" : "remove them");
}
