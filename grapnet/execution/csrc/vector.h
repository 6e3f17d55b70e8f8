// Vectors of GRAPNET_VECTOR_BYTES or less, and what is done with several of them: transposing and summing across.
//
// Everything lies in an anonymous namespace and uses no templates of the standard library: the same source is compiled
// for several instruction sets, and the linker must never replace one variant's function by another's.
#pragma once

#include <utility>

#include "halves.h"

namespace grapnet {
namespace {

// A row of `Bytes` bytes: `count` vectors of `lanes` numbers.
template <class T, int Bytes>
struct Row {
    static constexpr int vector_bytes = Bytes < GRAPNET_VECTOR_BYTES ? Bytes : GRAPNET_VECTOR_BYTES;
    static constexpr int count = Bytes / vector_bytes;
    static constexpr int lanes = vector_bytes / int(sizeof(T));
    static constexpr int size = Bytes / int(sizeof(T));
    using Vector = typename VectorOf<T, vector_bytes>::type;
    using Unaligned = typename VectorOf<T, vector_bytes>::unaligned;

    static Vector load(const T* from) { return *reinterpret_cast<const Unaligned*>(from); }
    static void store(T* to, Vector v) { *reinterpret_cast<Unaligned*>(to) = v; }
    template <class Half>
    static Vector load(const Half* from) { return widened<lanes>(from); }
    template <class Half>
    static void store(Half* to, Vector v) { narrow<lanes>(v, to); }
    static Vector splat(T value) { return value - Vector{}; }
};

template <int N>
using Lanes = std::make_integer_sequence<int, N>;

// Lanes whose bit `Step` is 0 come from the same lane of a, the others from b, `Step` lanes lower.
template <int Step, class V, int... I>
GRAPNET_INLINE V low_lanes(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, ((I & Step) ? int(sizeof...(I)) + I - Step : I)...);
}

// Lanes whose bit `Step` is 0 come from a, `Step` lanes higher, the others from the same lane of b.
template <int Step, class V, int... I>
GRAPNET_INLINE V high_lanes(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, ((I & Step) ? int(sizeof...(I)) + I : I + Step)...);
}

template <int Step, class V, int... I>
GRAPNET_INLINE V swapped_lanes(V a, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, a, (I ^ Step)...);
}

// Transposes N vectors of N lanes in place.
template <int N, class V, int Step = N / 2>
GRAPNET_INLINE void transpose(V* rows) {
    if constexpr (Step > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
            if (!(i & Step)) {
                const V a = rows[i], b = rows[i + Step];
                rows[i] = low_lanes<Step>(a, b, Lanes<N>{});
                rows[i + Step] = high_lanes<Step>(a, b, Lanes<N>{});
            }
        transpose<N, V, Step / 2>(rows);
    }
}

// Returns a vector of N lanes whose lane q is the sum over all lanes of row(q), q < Rows; Rows is a power of two.
// The rows are asked for one by one, as integral constants, so that few of them are held at a time.
template <int N, int Rows, int Step = 1, int First = 0, class RowOf>
GRAPNET_INLINE auto sums_of(RowOf row) {
    if constexpr (Step < Rows) {
        const auto a = sums_of<N, Rows, 2 * Step, First>(row);
        const auto b = sums_of<N, Rows, 2 * Step, First + Step>(row);
        return low_lanes<Step>(a, b, Lanes<N>{}) + high_lanes<Step>(a, b, Lanes<N>{});
    } else if constexpr (Step < N) {
        const auto a = sums_of<N, Rows, 2 * Step, First>(row);
        return a + swapped_lanes<Step>(a, Lanes<N>{});
    } else {
        return row(std::integral_constant<int, First>{});
    }
}

}  // namespace
}  // namespace grapnet
