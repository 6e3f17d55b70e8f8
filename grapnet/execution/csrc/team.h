// Threads: a team runs one function, and each member takes its share of the rows.
#pragma once

#include "kernels.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace grapnet {
namespace {

inline Index least(Index a, Index b) { return a < b ? a : b; }

inline void wait_for_team() {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

// Calls body(member, members) on every member of a team.
template <class Body>
void run_team([[maybe_unused]] int threads, Body body) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    body(0, 1);
}

// How many threads are worth starting for so many multiplications.
inline int useful_threads(int threads, double work) {
    const double most = 1 + work / 65536;
    return threads < most ? threads : static_cast<int>(most);
}

// What any member of a team can raise; after the team has met, every member sees it.
class Flag {
  public:
    void raise() { __atomic_store_n(&raised_, true, __ATOMIC_RELAXED); }
    bool raised() const { return __atomic_load_n(&raised_, __ATOMIC_RELAXED); }

  private:
    bool raised_ = false;
};

struct Range {
    Index first, last;
};

// The share of one member of `rows` rows, in whole blocks.
inline Range even_share(Index rows, Index block, int member, int members) {
    const Index blocks = (rows + block - 1) / block;
    return {least(rows, blocks * member / members * block), least(rows, blocks * (member + 1) / members * block)};
}

// The first row of one member when every row costs its relations and a little more.
inline Index balanced_row(const std::int32_t* ptr, Index rows, int member, int members) {
    constexpr Index row_cost = 4;
    const Index wanted = (ptr[rows] + row_cost * rows) * member / members;
    Index low = 0, high = rows;
    while (low < high) {
        const Index middle = (low + high) / 2;
        if (ptr[middle] + row_cost * middle < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

inline Range balanced_share(const std::int32_t* ptr, Index rows, int member, int members) {
    return {balanced_row(ptr, rows, member, members),
            member + 1 == members ? rows : balanced_row(ptr, rows, member + 1, members)};
}

}  // namespace
}  // namespace grapnet
