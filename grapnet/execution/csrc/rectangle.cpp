// The rectangle of a dense matrix multiplication: values are written into it and read from it.
#include <algorithm>

#include "team.h"
#include "wiring.h"

namespace grapnet {
namespace {

constexpr Index block = 32;  // parents at a time in a transposed rectangle, so that whole cache lines are written

Range parents_of(const Wiring& wiring, int member, int members) {
    const Range share = balanced_share(wiring.ptr, wiring.parents, member, members);
    const auto whole = [&](Index row) { return row == wiring.parents ? row : row / block * block; };
    return {whole(share.first), whole(share.last)};
}

template <class T>
void fill_rows(const Wiring& wiring, T* cells, const T* values, Range parents, T*) {
    for (Index i = parents.first; i < parents.last; ++i) {
        T* row = cells + i * wiring.children;
        std::fill_n(row, wiring.children, T(0));
        for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e) row[wiring.child[e]] = values[e];
    }
}

template <class T>
void fill_columns(const Wiring& wiring, T* cells, const T* values, Range parents, T* tile) {
    for (Index first = parents.first; first < parents.last; first += block) {
        const Index width = least(block, parents.last - first);
        std::fill_n(tile, wiring.children * block, T(0));
        for (Index i = 0; i < width; ++i)
            for (Index e = wiring.ptr[first + i]; e < wiring.ptr[first + i + 1]; ++e)
                tile[wiring.child[e] * block + i] = values[e];
        for (Index j = 0; j < wiring.children; ++j)
            std::copy_n(tile + j * block, width, cells + j * wiring.parents + first);
    }
}

template <class T>
void pick_rows(const Wiring& wiring, const T* cells, T* values, Range parents, T*) {
    for (Index i = parents.first; i < parents.last; ++i)
        for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e)
            values[e] = cells[i * wiring.children + wiring.child[e]];
}

template <class T>
void pick_columns(const Wiring& wiring, const T* cells, T* values, Range parents, T* tile) {
    for (Index first = parents.first; first < parents.last; first += block) {
        const Index width = least(block, parents.last - first);
        for (Index j = 0; j < wiring.children; ++j)
            std::copy_n(cells + j * wiring.parents + first, width, tile + j * block);
        for (Index i = 0; i < width; ++i)
            for (Index e = wiring.ptr[first + i]; e < wiring.ptr[first + i + 1]; ++e)
                values[e] = tile[wiring.child[e] * block + i];
    }
}

// Calls body(a member's parents, its tile [children, block]).
template <class T, class Body>
void share_parents(const Wiring& wiring, int threads, Body body) {
    threads = useful_threads(threads, double(wiring.parents) * double(wiring.children));
    const Index size = wiring.children * block;
    T* tiles = static_cast<T*>(scratch(sizeof(T) * size * threads));
    run_team(threads, [&](int member, int members) {
        body(parents_of(wiring, member, members), tiles + size * member);
    });
}

template <class T>
void fill_as(const Wiring& wiring, const Rectangle& rectangle, const void* values, int threads) {
    share_parents<T>(wiring, threads, [&](Range parents, T* tile) {
        const auto write = rectangle.transposed ? fill_columns<T> : fill_rows<T>;
        write(wiring, static_cast<T*>(rectangle.data), static_cast<const T*>(values), parents, tile);
    });
}

template <class T>
void pick_as(const Wiring& wiring, const Rectangle& rectangle, void* values, int threads) {
    share_parents<T>(wiring, threads, [&](Range parents, T* tile) {
        const auto read = rectangle.transposed ? pick_columns<T> : pick_rows<T>;
        read(wiring, static_cast<const T*>(rectangle.data), static_cast<T*>(values), parents, tile);
    });
}

}  // namespace

void fill(const Wiring& wiring, const Rectangle& rectangle, const void* values, int threads) {
    if (rectangle.number_size == 8)
        fill_as<std::uint64_t>(wiring, rectangle, values, threads);
    else if (rectangle.number_size == 4)
        fill_as<std::uint32_t>(wiring, rectangle, values, threads);
    else
        fill_as<std::uint16_t>(wiring, rectangle, values, threads);
}

void pick(const Wiring& wiring, const Rectangle& rectangle, void* values, int threads) {
    if (rectangle.number_size == 8)
        pick_as<std::uint64_t>(wiring, rectangle, values, threads);
    else if (rectangle.number_size == 4)
        pick_as<std::uint32_t>(wiring, rectangle, values, threads);
    else
        pick_as<std::uint16_t>(wiring, rectangle, values, threads);
}

}  // namespace grapnet
