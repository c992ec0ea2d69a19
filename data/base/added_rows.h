/*
A hook for tests. What a run takes follows from tables: of tensors, activations, passes over memory and slots
of the optimizer. A test adds a row to one of them, and sees that everything that is made from the table has
it. Outside of tests there are no such rows.
*/
#pragma once

#include <vector>

// Those that are added to tables of rows of this type.
template <typename Row>
inline std::vector<Row> added_rows;

template <typename Row>
std::vector<Row> with_added(std::vector<Row> table) {
    table.insert(table.end(), added_rows<Row>.begin(), added_rows<Row>.end());
    return table;
}
