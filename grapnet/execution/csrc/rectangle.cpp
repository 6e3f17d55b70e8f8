// The rectangle of a dense matrix multiplication: values are written into it and read from it.
#include <algorithm>
#include <cstring>

#include "checks.h"
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

bool children_exist(const Wiring& wiring, Index parent) {
    const Index start = wiring.ptr[parent];
    return Below(wiring.children).has_all(wiring.child + start, wiring.ptr[parent + 1] - start);
}

template <class T>
bool fill_rows(const Wiring& wiring, T* cells, const T* values, Range parents, T*) {
    for (Index i = parents.first; i < parents.last; ++i) {
        T* row = cells + i * wiring.children;
        std::fill_n(row, wiring.children, T(0));
        if (!children_exist(wiring, i)) return false;
        for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e) row[wiring.child[e]] = values[e];
    }
    return true;
}

template <class T>
bool fill_columns(const Wiring& wiring, T* cells, const T* values, Range parents, T* tile) {
    for (Index first = parents.first; first < parents.last; first += block) {
        const Index width = least(block, parents.last - first);
        std::fill_n(tile, wiring.children * block, T(0));
        for (Index i = 0; i < width; ++i) {
            if (!children_exist(wiring, first + i)) return false;
            for (Index e = wiring.ptr[first + i]; e < wiring.ptr[first + i + 1]; ++e)
                tile[wiring.child[e] * block + i] = values[e];
        }
        for (Index j = 0; j < wiring.children; ++j)
            std::copy_n(tile + j * block, width, cells + j * wiring.parents + first);
    }
    return true;
}

template <class T>
bool pick_rows(const Wiring& wiring, const T* cells, T* values, Range parents, T*) {
    for (Index i = parents.first; i < parents.last; ++i) {
        if (!children_exist(wiring, i)) return false;
        for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e)
            values[e] = cells[i * wiring.children + wiring.child[e]];
    }
    return true;
}

template <class T>
bool pick_columns(const Wiring& wiring, const T* cells, T* values, Range parents, T* tile) {
    for (Index first = parents.first; first < parents.last; first += block) {
        const Index width = least(block, parents.last - first);
        for (Index j = 0; j < wiring.children; ++j)
            std::copy_n(cells + j * wiring.parents + first, width, tile + j * block);
        for (Index i = 0; i < width; ++i) {
            if (!children_exist(wiring, first + i)) return false;
            for (Index e = wiring.ptr[first + i]; e < wiring.ptr[first + i + 1]; ++e)
                values[e] = tile[wiring.child[e] * block + i];
        }
    }
    return true;
}

// Numbers of any size, `size` bytes each: the kernels of a convolution.
bool fill_wide(const Wiring& wiring, char* cells, const char* values, Range parents, std::size_t size) {
    const std::size_t row_size = std::size_t(wiring.children) * size;
    for (Index i = parents.first; i < parents.last; ++i) {
        char* row = cells + i * row_size;
        if (!children_exist(wiring, i)) return false;
        // What lies between two relations is emptied while the cache holds it.
        Index next = 0;
        bool ascending = true;
        for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e) {
            const Index j = wiring.child[e];
            ascending = ascending && j >= next;
            if (!ascending) break;
            if (j > next) std::memset(row + next * size, 0, (j - next) * size);
            std::memcpy(row + j * size, values + e * size, size);
            next = j + 1;
        }
        if (ascending) {
            std::memset(row + next * size, 0, (wiring.children - next) * size);
            continue;
        }
        std::memset(row, 0, row_size);
        for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e)
            std::memcpy(row + wiring.child[e] * size, values + e * size, size);
    }
    return true;
}

bool pick_wide(const Wiring& wiring, const char* cells, char* values, Range parents, std::size_t size) {
    for (Index i = parents.first; i < parents.last; ++i) {
        if (!children_exist(wiring, i)) return false;
        const char* row = cells + i * wiring.children * size;
        for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e)
            std::memcpy(values + e * size, row + wiring.child[e] * size, size);
    }
    return true;
}

// Calls body(a member's parents, its tile [children, block]), which says whether all went well.
template <class T, class Body>
bool share_parents(const Wiring& wiring, int threads, Body body) {
    if (!has_lists(wiring)) return false;
    threads = useful_threads(threads, double(wiring.parents) * double(wiring.children));
    const Index size = wiring.children * block;
    T* tiles = static_cast<T*>(scratch(sizeof(T) * size * threads));
    Flag wrong;
    run_team(threads, [&](int member, int members) {
        if (!body(parents_of(wiring, member, members), tiles + size * member)) wrong.raise();
    });
    return !wrong.raised();
}

template <class T>
bool fill_as(const Wiring& wiring, const Rectangle& rectangle, const void* values, int threads) {
    return share_parents<T>(wiring, threads, [&](Range parents, T* tile) {
        const auto write = rectangle.transposed ? fill_columns<T> : fill_rows<T>;
        return write(wiring, static_cast<T*>(rectangle.data), static_cast<const T*>(values), parents, tile);
    });
}

template <class T>
bool pick_as(const Wiring& wiring, const Rectangle& rectangle, void* values, int threads) {
    return share_parents<T>(wiring, threads, [&](Range parents, T* tile) {
        const auto read = rectangle.transposed ? pick_columns<T> : pick_rows<T>;
        return read(wiring, static_cast<const T*>(rectangle.data), static_cast<T*>(values), parents, tile);
    });
}

}  // namespace

bool fill(const Wiring& wiring, const Rectangle& rectangle, const void* values, int threads) {
    if (rectangle.number_size == 8) return fill_as<std::uint64_t>(wiring, rectangle, values, threads);
    if (rectangle.number_size == 4) return fill_as<std::uint32_t>(wiring, rectangle, values, threads);
    if (rectangle.number_size == 2) return fill_as<std::uint16_t>(wiring, rectangle, values, threads);
    if (rectangle.transposed) return false;
    return share_parents<char>(wiring, threads, [&](Range parents, char*) {
        return fill_wide(wiring, static_cast<char*>(rectangle.data), static_cast<const char*>(values), parents,
                         rectangle.number_size);
    });
}

bool pick(const Wiring& wiring, const Rectangle& rectangle, void* values, int threads) {
    if (rectangle.number_size == 8) return pick_as<std::uint64_t>(wiring, rectangle, values, threads);
    if (rectangle.number_size == 4) return pick_as<std::uint32_t>(wiring, rectangle, values, threads);
    if (rectangle.number_size == 2) return pick_as<std::uint16_t>(wiring, rectangle, values, threads);
    if (rectangle.transposed) return false;
    return share_parents<char>(wiring, threads, [&](Range parents, char*) {
        return pick_wide(wiring, static_cast<const char*>(rectangle.data), static_cast<char*>(values), parents,
                         rectangle.number_size);
    });
}

}  // namespace grapnet
