/*
What a card is given to do, and the order in which it does it.

An item of work waits for others: the one before it on its stream, and what events and graphs make it wait
for. Nothing else orders it. A card does what has nothing left to wait for in an order that nobody knows; here
one thread does it, in an order drawn by a seed (NOCARD_SEED; 0: in the order of the calls). It is also as
late as a card may be: work is done when a host thread waits or asks for it, when much of it has come
together, or when no call has come for a while. So work that forgets to wait for other work is done before it
under some seeds.

Streams have priorities, which are drawn anew now and then, and the first of what can be done is done: a
stream that is behind stays behind for long, as it must for what it should have done to be missed.

Some work cannot be done at one go, such as what waits for another rank: it is begun, and looked at again.
*/
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace nocard {

// Does what can be done now; false: something is left. Called by the thread of the card.
using Advance = std::function<bool()>;

// Memory of the card, or pinned memory, that work reads or writes.
struct Touched {
    const void* address;
    size_t bytes;
};

// Something to do, which a graph does again and again.
struct Operation {
    std::string call;                // for messages
    std::vector<Touched> touched;    // must be live until it is done
    double seconds = 0;              // a card would take so long for what is not really done here
    std::function<Advance()> begin;  // called when it is given to the card, in the order of the calls
    bool kernel = false;             // for the report
};

// An operation that is done at one go.
Operation at_once(std::string call, std::vector<Touched> touched, std::function<void()> work);

struct Item;
using ItemPtr = std::shared_ptr<Item>;

// Work for the card, when all of `before` is done (null: nothing). lane: the stream; order is drawn by lanes.
// Waits while the card has very much to do.
ItemPtr give(const Operation& operation, int lane, const std::vector<ItemPtr>& before);

// A mark that is reached when all of `before` is done.
ItemPtr give_mark(int lane, const std::vector<ItemPtr>& before);

bool is_done(const ItemPtr& item);

// Asks: the card does a little, not always enough.
bool ask(const ItemPtr& item);

void wait_for(const ItemPtr& item);

// Waits until everything is done.
void wait_for_all();

// When it was done, in seconds by the card's clock.
double time_done(const ItemPtr& item);

// The call of unfinished work that touches this memory; empty: there is none.
std::string user_of(const void* address, size_t bytes);

// Draws a number below `below` for choices of the host's side, such as whether a copy waits.
uint64_t draw(uint64_t below);

// Begins to draw anew, for tests.
void use_seed(uint64_t seed);

// Tells whether this thread calls a host function, which may not call CUDA.
bool in_host_function();

// The work calls the function on a thread of its own, and the card goes on beside it.
Operation host_function(void (*function)(void*), void* data);

}  // namespace nocard
