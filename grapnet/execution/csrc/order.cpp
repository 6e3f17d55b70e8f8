// The order by child: made by a counting sort, or carried over a small cut.
#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.h"
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
    for (Index e = 0; e < wiring.relations; ++e) ++in_ptr[wiring.child[e] + 1];
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

// Where the entry of `parent` stands among those of one child; null when it has none there.
template <class Entry>
Entry* find_entry(Entry* first, Entry* last, Index parent) {
    Entry* found = std::lower_bound(first, last, entry_of<Entry>(parent, 0));
    const bool is_there = found != last && *found >> half<Entry> == Entry(parent);
    return is_there ? found : nullptr;
}

template <class Entry>
bool carry_entries(const Wiring& wiring, const ByChild& old, const std::int32_t* removed, Index n_removed,
                   std::int32_t* in_ptr, Entry* entries) {
    const Entry* source = static_cast<const Entry*>(old.entries);
    const Below children(wiring.children);
    std::vector<Index> gaps(n_removed);  // positions in the old order that go
    std::vector<Index> owners(n_removed);
    for (Index r = 0; r < n_removed; ++r) {
        if (r > 0 && removed[r] <= removed[r - 1]) return false;
        if (!Below(wiring.relations).has(removed[r])) return false;
        owners[r] = std::upper_bound(wiring.ptr, wiring.ptr + wiring.parents + 1, removed[r]) - wiring.ptr - 1;
        if (!children.has(wiring.child[removed[r]])) return false;
        const Index j = wiring.child[removed[r]];
        const Entry* gap = find_entry(source + old.in_ptr[j], source + old.in_ptr[j + 1], owners[r]);
        if (gap == nullptr || *gap != entry_of<Entry>(owners[r], removed[r] - wiring.ptr[owners[r]])) return false;
        gaps[r] = gap - source;
    }
    std::sort(gaps.begin(), gaps.end());
    if (std::adjacent_find(gaps.begin(), gaps.end()) != gaps.end()) return false;

    Index from = 0;
    Entry* to = entries;
    for (Index gap : gaps) {
        to = std::copy(source + from, source + gap, to);
        from = gap + 1;
    }
    std::copy(source + from, source + wiring.relations, to);

    Index gone = 0;
    for (Index j = 0; j <= wiring.children; ++j) {
        while (gone < n_removed && gaps[gone] < old.in_ptr[j]) ++gone;
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
            if (!children.has(wiring.child[e])) return false;
            const Index j = wiring.child[e];
            Entry* entry = find_entry(entries + in_ptr[j], entries + in_ptr[j + 1], owner);
            if (entry == nullptr) return false;
            *entry -= Entry(before);
        }
    }
    return true;
}

__extension__ typedef unsigned __int128 Wide;

// Mixes the bits of a number: both halves of the product of two numbers that each depend on all of it.
std::uint64_t mixed(std::uint64_t number) {
    const std::uint64_t spread = (number + 1) * 0x9e3779b97f4a7c15;
    const Wide product = Wide(spread ^ 0xbf58476d1ce4e5b9) * (spread ^ (spread >> 32) ^ 0x94d049bb133111eb);
    return std::uint64_t(product) ^ std::uint64_t(product >> 64);
}

}  // namespace

bool order_by_child(const Wiring& wiring, bool wide, std::int32_t* in_ptr, void* entries) {
    if (!has_lists(wiring)) return false;
    if (!Below(wiring.children).has_all(wiring.child, wiring.relations)) return false;
    count_children(wiring, in_ptr);
    if (wide)
        place_entries(wiring, in_ptr, static_cast<std::uint64_t*>(entries));
    else
        place_entries(wiring, in_ptr, static_cast<std::uint32_t*>(entries));
    return true;
}

bool order_without(const Wiring& wiring, const ByChild& old, const std::int32_t* removed, Index n_removed,
                   std::int32_t* in_ptr, void* entries) {
    if (!has_lists(wiring)) return false;
    if (!is_partition(old.in_ptr, wiring.children, wiring.relations)) return false;
    if (old.wide)
        return carry_entries(wiring, old, removed, n_removed, in_ptr, static_cast<std::uint64_t*>(entries));
    return carry_entries(wiring, old, removed, n_removed, in_ptr, static_cast<std::uint32_t*>(entries));
}

bool family_hashes(const Wiring& wiring, int threads, std::uint64_t* hashes) {
    if (!is_partition(wiring.ptr, wiring.parents, wiring.relations)) return false;
    run_team(useful_threads(threads, double(wiring.relations)), [&](int member, int members) {
        const Range parents = balanced_share(wiring.ptr, wiring.parents, member, members);
        for (Index i = parents.first; i < parents.last; ++i) {
            std::uint64_t total = 0;
            for (Index e = wiring.ptr[i]; e < wiring.ptr[i + 1]; ++e) total += mixed(std::uint64_t(wiring.child[e]));
            hashes[i] = total;
        }
    });
    return true;
}

}  // namespace grapnet
