/*
A product as work of a stream: checked against live memory, and computed on the host. If its sums are split
over k, it runs in two parts. In between, the partial sums lie in the workspace, where work of another stream
that uses the same workspace corrupts them.

A product of more than NOCARD_MOST_PRODUCT (2e9) multiply-adds is not computed: its results are NaNs, so that
any use of them shows. Measurements of rates need no results: they read the time on the card's clock.
*/
#pragma once

#include "test/nocard/products.h"
#include "test/nocard/schedule.h"

namespace nocard {

// share: the fraction of the card's rate that the algorithm reaches. Ends the process if the product would
// read or write outside of live memory.
Operation product_operation(const HostProduct& product, double share);

}  // namespace nocard
