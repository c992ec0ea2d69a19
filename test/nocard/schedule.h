/*
The work given to a card, and the order in which the card does it.

An item of work waits for others: the item before it on its stream, and those that events and graphs make it
wait for. Nothing else orders it. A card does ready items in an unknown order; here one thread does them, in
an order drawn from a seed (NOCARD_SEED; 0: in the order of the calls). The thread is also as late as a card
may be: it works when a host thread waits or polls, when much work has piled up, or when no call has come for
a while. So work that lacks a wait runs too early under some seeds.

Streams have priorities, which are redrawn now and then, and the ready item of the highest priority is done
first. A stream that is behind stays behind for long, as it must for a missing wait to show.

Some work cannot be done in one step, such as work that waits for another rank: it is begun, and polled later.
*/
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace nocard {

// Does what can be done now; returns false if something is left. Called by the card's thread.
using Advance = std::function<bool()>;

// Memory of the card, or pinned memory, that work reads or writes.
struct Touched {
    const void* address;
    size_t bytes;
};

// A piece of work, which a graph runs once per launch.
struct Operation {
    std::string call;                // for messages
    std::vector<Touched> touched;    // must be live until it is done
    double seconds = 0;              // time that a card would need for what is not really done here
    std::function<Advance()> begin;  // called when it is given to the card, in the order of the calls
    bool kernel = false;             // for the report
};

// Returns an operation that is done in one step.
Operation at_once(std::string call, std::vector<Touched> touched, std::function<void()> work);

struct Item;
using ItemPtr = std::shared_ptr<Item>;

// Gives work to the card, to start when all of `before` is done (null: nothing). lane: the stream; the order
// is drawn by lanes. Blocks while the card has very much to do.
ItemPtr give(const Operation& operation, int lane, const std::vector<ItemPtr>& before);

// Gives a mark, which is reached when all of `before` is done.
ItemPtr give_mark(int lane, const std::vector<ItemPtr>& before);

bool is_done(const ItemPtr& item);

// Polls: the card does a little work, which is not always enough.
bool ask(const ItemPtr& item);

void wait_for(const ItemPtr& item);

// Waits until everything is done.
void wait_for_all();

// Returns when the item was done, in seconds of the card's clock.
double time_done(const ItemPtr& item);

// Returns the call of unfinished work that touches this memory, or an empty string.
std::string user_of(const void* address, size_t bytes);

// Draws a number below `below` for choices of the host's side, such as whether a copy waits.
uint64_t draw(uint64_t below);

// Restarts the draws from a seed, for tests.
void use_seed(uint64_t seed);

// Returns whether this thread is calling a host function, which may not call CUDA.
bool in_host_function();

// Returns an operation that calls the function on a separate thread, while the card does other work.
Operation host_function(void (*function)(void*), void* data);

}  // namespace nocard
