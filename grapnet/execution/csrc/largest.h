// The largest values of every row: the bar that they reach is found by halving the range of numbers it can be.
#pragma once

#include "checks.h"
#include "team.h"

namespace grapnet {
namespace {

template <class T>
struct KeyOf;
template <>
struct KeyOf<float> {
    using type = std::int32_t;
};
template <>
struct KeyOf<double> {
    using type = std::int64_t;
};

// Whole numbers in the order of the floating-point numbers that they stand for.
template <class T>
using Key = typename KeyOf<T>::type;

// Reverses the order of negative ones, whose bits grow away from 0.
template <class K>
K turned(K bits) {
    return bits < 0 ? bits ^ K(~(K(1) << (8 * sizeof(K) - 1))) : bits;
}

template <class T>
Key<T> key_of(T value) {
    Key<T> bits;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return turned(bits);
}

template <class T>
T value_of(Key<T> key) {
    key = turned(key);
    T value;
    __builtin_memcpy(&value, &key, sizeof(T));
    return value;
}

template <class T>
Index count_from(const T* values, Index size, T bar) {
    Key<T> count = 0;  // as wide as a value, so that a vector counts as many as it compares
    for (Index i = 0; i < size; ++i) count += values[i] >= bar;
    return count;
}

// Writes the positions, counted from `first`, of the `wanted` largest values from `least_value` on, and -1 after them
// where there are fewer.
template <class T>
void largest_of(const T* values, Index size, T least_value, Index wanted, Index first, std::int32_t* positions) {
    if (wanted == 0) return;
    T bar = least_value;
    const Index available = count_from(values, size, bar);
    for (; wanted > available; --wanted) positions[wanted - 1] = -1;
    Index equals = wanted;  // how many of those that are just as large as the bar come in
    if (available > wanted) {
        Key<T> low = key_of(bar), high = key_of(T(__builtin_inf())) + 1;
        Index above = 0;  // how many reach `high`: fewer than wanted, while more reach `low`
        while (above < wanted) {
            const Key<T> middle = (low & high) + ((low ^ high) >> 1);  // their mean, rounded down
            if (middle == low) break;
            const Index count = count_from(values, size, value_of<T>(middle));
            (count > wanted ? low : high) = middle;
            if (count <= wanted) above = count;
        }
        bar = value_of<T>(above == wanted ? high : low);
        if (above < wanted) equals = wanted - above;
    }
    Index n = 0;
    for (Index i = 0; n < wanted && i < size; ++i) {  // without branches: what is not taken is written over
        const bool equal = values[i] == bar;
        positions[n] = static_cast<std::int32_t>(first + i);
        n += (values[i] > bar) | (equal & (equals > 0));
        equals -= equal;
    }
    for (; n < wanted; ++n) positions[n] = -1;  // somebody has written into the values meanwhile
}

template <class T>
Index largest_of_rows(const Largest& largest) {
    constexpr double passes = 16;  // over a row until its bar is found, or about as many
    const Index rows = largest.rows;
    const std::int32_t *ptr = largest.ptr, *starts = largest.starts;
    if (!is_partition(ptr, rows, largest.size) || !is_partition(starts, rows, largest.room)) return -1;
    const int threads = useful_threads(largest.threads, passes * ptr[rows]);
    run_team(threads, [&](int member, int members) {
        const Range share = balanced_share(ptr, rows, member, members);
        for (Index r = share.first; r < share.last; ++r)
            largest_of(static_cast<const T*>(largest.values) + ptr[r], ptr[r + 1] - ptr[r], T(largest.least),
                       starts[r + 1] - starts[r], ptr[r], largest.positions + starts[r]);
    });
    Index found = 0;
    for (Index n = 0; n < starts[rows]; ++n)
        if (largest.positions[n] >= 0) largest.positions[found++] = largest.positions[n];
    return found;
}

}  // namespace
}  // namespace grapnet
