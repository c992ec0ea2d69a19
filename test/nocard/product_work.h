/*
A product as work of a stream: checked against the memory that there is, made on the host, and in two parts
where its sums are cut, between which they lie in the workspace. Other work that uses the same workspace from
another stream spoils them there.

A product of more than NOCARD_MOST_PRODUCT (2e9) multiply-adds is not made: its results are NaNs, so that
whoever used them would see it. That is for measurements of rates, which take the time that a card would.
*/
#pragma once

#include "test/nocard/products.h"
#include "test/nocard/schedule.h"

namespace nocard {

// share: of the card's rate, that its algorithm has. Ends the process if the product would read or write
// where nothing is.
Operation product_operation(const HostProduct& product, double share);

}  // namespace nocard
