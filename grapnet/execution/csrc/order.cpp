// The order by child: made by a counting sort, or carried over a small cut.
#include <algorithm>
#include <cstring>
#include <vector>

#include "team.h"
#include "wiring.h"

namespace grapnet {
namespace {

template <class Entry>
constexpr int half = 4 * int(sizeof(Entry));

template <class Entry>
Entry entry_of(Index parent, Index slot) {
    return Entry(parent) << half<Entry> | Entry(slot);
}

void count_children(const Wiring& wiring, std::int32_t* in_ptr) {
    std::fill_n(in_ptr, wiring.children + 1, 0);
    for (Index e = 0; e < wiring.relations(); ++e) ++in_ptr[wiring.child[e] + 1];
    for (Index j = 0; j < wiring.children; ++j) in_ptr[j + 1] += in_ptr[j];
}

// Writes every entry behind those of the same child. Entries wait in one cache line for each child until it is full:
// written one by one they would touch another page every time.
template <class Entry>
void place_entries(const Wiring& wiring, const std::int32_t* in_ptr, Entry* entries) {
    constexpr int line = 64 / sizeof(Entry);
    std::vector<std::int32_t> next(in_ptr, in_ptr + wiring.children);
    std::vector<Entry> waiting(wiring.children * line);
    std::vector<std::uint8_t> held(wiring.children);
    for (Index i = 0; i < wiring.parents; ++i) {
        const Index start = wiring.ptr[i], degree = wiring.ptr[i + 1] - start;
        for (Index slot = 0; slot < degree; ++slot) {
            const Index j = wiring.child[start + slot];
            waiting[j * line + held[j]] = entry_of<Entry>(i, slot);
            if (++held[j] == line) {
                std::memcpy(entries + next[j], &waiting[j * line], sizeof(Entry) * line);
                next[j] += line;
                held[j] = 0;
            }
        }
    }
    for (Index j = 0; j < wiring.children; ++j) std::copy_n(&waiting[j * line], held[j], entries + next[j]);
}

// Where the entry of `parent` stands among those of one child.
template <class Entry>
Entry* entry_at(Entry* first, Entry* last, Index parent) {
    return std::lower_bound(first, last, entry_of<Entry>(parent, 0));
}

template <class Entry>
void carry_entries(const Wiring& wiring, const ByChild& old, const std::int32_t* removed, Index n_removed,
                   std::int32_t* in_ptr, Entry* entries) {
    const Entry* source = static_cast<const Entry*>(old.entries);
    std::vector<Index> gaps(n_removed);  // positions in the old order that go
    std::vector<Index> owners(n_removed);
    for (Index r = 0; r < n_removed; ++r) {
        owners[r] = std::upper_bound(wiring.ptr, wiring.ptr + wiring.parents + 1, removed[r]) - wiring.ptr - 1;
        const Index j = wiring.child[removed[r]];
        gaps[r] = entry_at(source + old.in_ptr[j], source + old.in_ptr[j + 1], owners[r]) - source;
    }
    std::vector<Index> sorted(gaps);
    std::sort(sorted.begin(), sorted.end());

    Index from = 0;
    Entry* to = entries;
    for (Index gap : sorted) {
        to = std::copy(source + from, source + gap, to);
        from = gap + 1;
    }
    std::copy(source + from, source + wiring.relations(), to);

    Index gone = 0;
    for (Index j = 0; j <= wiring.children; ++j) {
        while (gone < n_removed && sorted[gone] < old.in_ptr[j]) ++gone;
        in_ptr[j] = old.in_ptr[j] - std::int32_t(gone);
    }

    for (Index r = 0; r < n_removed;) {  // later slots of the same owner move up
        const Index owner = owners[r];
        Index before = 0;
        for (Index e = removed[r]; e < wiring.ptr[owner + 1]; ++e) {
            if (r < n_removed && removed[r] == e) {
                ++r, ++before;
                continue;
            }
            const Index j = wiring.child[e];
            *entry_at(entries + in_ptr[j], entries + in_ptr[j + 1], owner) -= Entry(before);
        }
    }
}

__extension__ typedef unsigned __int128 Wide;

// Mixes the bits of a number: both halves of the product of two numbers that each depend on all of it.
std::uint64_t mixed(std::uint64_t number) {
    const std::uint64_t spread = (number + 1) * 0x9e3779b97f4a7c15;
    const Wide product = Wide(spread ^ 0xbf58476d1ce4e5b9) * (spread ^ (spread >> 32) ^ 0x94d049bb133111eb);
    return std::uint64_t(product) ^ std::uint64_t(product >> 64);
}

}  // namespace

void order_by_child(const Wiring& wiring, bool wide, std::int32_t* in_ptr, void* entries) {
    count_children(wiring, in_ptr);
    if (wide)
        place_entries(wiring, in_ptr, static_cast<std::uint64_t*>(entries));
    else
        place_entries(wiring, in_ptr, static_cast<std::uint32_t*>(entries));
}

void order_without(const Wiring& wiring, const ByChild& old, const std::int32_t* removed, Index n_removed,
                   std::int32_t* in_ptr, void* entries) {
    if (old.wide)
        carry_entries(wiring, old, removed, n_removed, in_ptr, static_cast<std::uint64_t*>(entries));
    else
        carry_entries(wiring, old, removed, n_removed, in_ptr, static_cast<std::uint32_t*>(entries));
}

void family_hashes(const Wiring& wiring, int threads, std::uint64_t* hashes) {
    run_team(useful_threads(threads, double(wiring.relations())), [&](int member, int members) {
        const Range parents = balanced_share(wiring.ptr, wiring.parents, member, members);
        for (Index i = parents.first; i < parents.last; ++i) {
            std::uint64_t total = 0;
            for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e) total += mixed(std::uint64_t(wiring.child[e]));
            hashes[i] = total;
        }
    });
}

}  // namespace grapnet
