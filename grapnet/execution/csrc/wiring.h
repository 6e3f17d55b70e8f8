// What is made of a wiring alone: the order by child, hashes of families, and the rectangle of its values.
// As in kernels.h, a function returns false when an index leads out of a buffer.
#pragma once

#include "kernels.h"

namespace grapnet {

// Sorts the relations by child into in_ptr [children + 1] and entries [relations].
bool order_by_child(const Wiring& wiring, bool wide, std::int32_t* in_ptr, void* entries);

// Copies the order `old` of `wiring` without the relations at the sorted positions `removed`.
bool order_without(const Wiring& wiring, const ByChild& old, const std::int32_t* removed, Index n_removed,
                   std::int32_t* in_ptr, void* entries);


// Writes, for every parent, a hash of its set of children that does not depend on their order.
bool family_hashes(const Wiring& wiring, int threads, std::uint64_t* hashes);

// A [parents, children] matrix of numbers of `number_size` bytes, or [children, parents] when transposed. Numbers of
// other sizes than 2, 4 and 8 are several numbers of one relation, and not transposed.
struct Rectangle {
    void* data;
    bool transposed;
    int number_size;
};

// Writes the values of the relations into the rectangle, 0 elsewhere.
bool fill(const Wiring& wiring, const Rectangle& rectangle, const void* values, int threads);

// Reads the values of the relations from the rectangle.
bool pick(const Wiring& wiring, const Rectangle& rectangle, void* values, int threads);

}  // namespace grapnet
