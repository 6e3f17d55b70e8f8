// Checks of a wiring: a kernel follows an index only after the same call has found it within its bounds.
#pragma once

#include "kernels.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace grapnet {
namespace {

// Says whether lists lie one behind the other in `size` places: 0 = ptr[0] ≤ ptr[1] ≤ … ≤ ptr[rows] = size.
inline bool is_partition(const std::int32_t* ptr, Index rows, Index size) {
    if (rows < 0 || ptr[0] != 0 || ptr[rows] != size) return false;
    std::int32_t falls = 0;  // no early out, so that whole vectors are compared
    for (Index i = 0; i < rows; ++i) falls |= ptr[i + 1] < ptr[i];
    return falls == 0;
}

// Says whether every parent has a list of relations, and there are children if there are relations.
inline bool has_lists(const Wiring& wiring) {
    const bool leads_somewhere = wiring.children > 0 || wiring.relations == 0;
    return leads_somewhere && is_partition(wiring.ptr, wiring.parents, wiring.relations);
}

// The numbers from 0 up to a bound that is positive: 0 ≤ number < bound.
class Below {
  public:
    explicit Below(Index bound) : last_(static_cast<std::uint32_t>((bound < most ? bound : most) - 1)) {}

    bool has(std::int32_t number) const { return static_cast<std::uint32_t>(number) <= last_; }

    bool has_all(const std::int32_t* numbers, Index count) const {
        std::uint32_t outside = 0;  // its highest bit: a number is negative, or the last one minus it is
        for (Index n = 0; n < count; ++n) {
            const std::uint32_t number = static_cast<std::uint32_t>(numbers[n]);
            outside |= number | (last_ - number);
        }
        return outside >> 31 == 0;
    }

    // The same for as many numbers as fit into a vector, so cheap that a loop can ask before it uses them.
    template <int Count>
    __attribute__((always_inline)) inline bool has_vector(const std::int32_t* numbers) const {
#ifdef __AVX512VL__
        if constexpr (Count == 16)
            return _mm512_cmpgt_epu32_mask(_mm512_loadu_si512(numbers), _mm512_set1_epi32(int(last_))) == 0;
        if constexpr (Count == 8) {
            const __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
            return _mm256_cmpgt_epu32_mask(given, _mm256_set1_epi32(int(last_))) == 0;
        }
#elif defined(__AVX2__)
        if constexpr (Count == 8) {
            const __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
            const __m256i left = _mm256_sub_epi32(_mm256_set1_epi32(int(last_)), given);
            return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(given, left))) == 0;
        }
#endif
#ifdef __SSE2__
        if constexpr (Count == 8) return has_vector<4>(numbers) & has_vector<4>(numbers + 4);
        if constexpr (Count == 4) {
            const __m128i given = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
            const __m128i left = _mm_sub_epi32(_mm_set1_epi32(int(last_)), given);
            return _mm_movemask_ps(_mm_castsi128_ps(_mm_or_si128(given, left))) == 0;
        }
#endif
        return has_all(numbers, Count);
    }

  private:
    static constexpr Index most = Index(1) << 31;

    std::uint32_t last_;
};

}  // namespace
}  // namespace grapnet
