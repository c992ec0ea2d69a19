#include "test/nocard/messages.h"

#include <cstring>
#include <map>
#include <mpi.h>
#include <mutex>
#include <tuple>

#include "test/nocard/fault.h"
#include "test/nocard/schedule.h"

namespace nocard {

class Sending {
public:
    std::vector<char> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
};

namespace {

constexpr int tag = 1;

struct Post {
    std::mutex mutex;
    MPI_Comm comm = MPI_COMM_NULL;
    int rank = 0, size = 1;
    using Place = std::tuple<int, uint64_t, uint64_t, int32_t>;  // sender; group, number, phase
    std::multimap<Place, std::unique_ptr<Message>> inbox;

    // Receives all messages that have arrived. The caller holds the lock.
    void receive() {
        for (int found = 1; comm != MPI_COMM_NULL;) {
            MPI_Message message;
            MPI_Status status;
            PMPI_Improbe(MPI_ANY_SOURCE, tag, comm, &found, &message, &status);
            if (!found) return;
            int bytes = 0;
            PMPI_Get_count(&status, MPI_BYTE, &bytes);
            std::vector<char> received((size_t)bytes);
            PMPI_Mrecv(received.data(), bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE);
            auto kept = std::make_unique<Message>();
            memcpy(&kept->label, received.data(), sizeof kept->label);
            kept->bytes.assign(received.begin() + sizeof kept->label, received.end());
            const Label& label = kept->label;
            Place place = {status.MPI_SOURCE, label.group, label.number, label.phase};
            inbox.emplace(place, std::move(kept));
        }
    }
};

Post& post() {
    static Post& post = *new Post;
    return post;
}

}  // namespace

bool has_messages() {
    return post().comm != MPI_COMM_NULL;
}

int world_rank() {
    return post().rank;
}

int world_size() {
    return post().size;
}

// Half of the sends complete only once the receiver polls, as may happen on a card.
std::shared_ptr<Sending> send_message(int to, const Label& label, const void* data, size_t bytes) {
    bool waits = draw(2);
    auto sending = std::make_shared<Sending>();
    sending->bytes.resize(sizeof label + bytes);
    memcpy(sending->bytes.data(), &label, sizeof label);
    if (bytes) memcpy(sending->bytes.data() + sizeof label, data, bytes);
    std::lock_guard lock(post().mutex);
    if (post().comm == MPI_COMM_NULL) return sending;
    auto start = waits ? PMPI_Issend : PMPI_Isend;
    start(sending->bytes.data(), (int)sending->bytes.size(), MPI_BYTE, to, tag, post().comm,
          &sending->request);
    return sending;
}

bool is_sent(Sending& sending) {
    std::lock_guard lock(post().mutex);
    int sent = 1;
    if (post().comm != MPI_COMM_NULL) PMPI_Test(&sending.request, &sent, MPI_STATUS_IGNORE);
    return sent;
}

std::unique_ptr<Message> take_message(int from, uint64_t group, uint64_t number, int32_t phase) {
    std::lock_guard lock(post().mutex);
    post().receive();
    auto place = post().inbox.find({from, group, number, phase});
    if (place == post().inbox.end()) return nullptr;
    std::unique_ptr<Message> message = std::move(place->second);
    post().inbox.erase(place);
    return message;
}

}  // namespace nocard

// ----------------------------------------------------------------------------
// the calls of the program that come here first

using namespace nocard;

extern "C" {

int MPI_Init_thread(int* argc, char*** argv, int, int* provided) {
    int error = PMPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, provided);
    if (error != MPI_SUCCESS) return error;
    if (*provided < MPI_THREAD_MULTIPLE)
        fault("MPI_Init_thread", "this MPI cannot be called by several threads at a time");
    std::lock_guard lock(post().mutex);
    PMPI_Comm_dup(MPI_COMM_WORLD, &post().comm);
    PMPI_Comm_set_errhandler(post().comm, MPI_ERRORS_RETURN);
    PMPI_Comm_rank(post().comm, &post().rank);
    PMPI_Comm_size(post().comm, &post().size);
    return error;
}

int MPI_Finalize() {
    {
        std::lock_guard lock(post().mutex);
        post().comm = MPI_COMM_NULL;
    }
    return PMPI_Finalize();
}
}
