// bfloat16 and float16: activations are read and written in them, and summed up in float.
#pragma once

#include "checks.h"

#define GRAPNET_INLINE __attribute__((always_inline)) inline

namespace grapnet {
namespace {

template <class T, int Bytes>
struct VectorOf {
    typedef T type __attribute__((vector_size(Bytes)));
    typedef T unaligned __attribute__((vector_size(Bytes), aligned(alignof(T)), may_alias));
};

struct BFloat16 {
    std::uint16_t bits;
};

struct Float16 {
    std::uint16_t bits;
};

// The type that numbers of type A are summed up in, which is also that of weights, biases and their gradients.
template <class A>
struct SumsOf {
    using type = A;
};
template <>
struct SumsOf<BFloat16> {
    using type = float;
};
template <>
struct SumsOf<Float16> {
    using type = float;
};
template <class A>
using Sums = typename SumsOf<A>::type;

// Vectors of N halves, and of the floats that they become.
template <int N>
struct Halves {
    using Bits = typename VectorOf<std::uint16_t, 2 * N>::type;
    using Unaligned = typename VectorOf<std::uint16_t, 2 * N>::unaligned;
    using Words = typename VectorOf<std::uint32_t, 4 * N>::type;
    using Floats = typename VectorOf<float, 4 * N>::type;

    static GRAPNET_INLINE Words words(const void* from) {
        return __builtin_convertvector(*static_cast<const Unaligned*>(from), Words);
    }
    static GRAPNET_INLINE void store(void* to, Words words) {
        *static_cast<Unaligned*>(to) = __builtin_convertvector(words, Bits);
    }
};

template <int N>
GRAPNET_INLINE typename Halves<N>::Floats widened(const BFloat16* from) {
    return (typename Halves<N>::Floats)(Halves<N>::words(from) << 16);
}

// Rounds to the nearest, of two to the even one. NaN stays NaN: a bit that rounding cannot carry away is set.
template <int N>
GRAPNET_INLINE void narrow(typename Halves<N>::Floats numbers, BFloat16* to) {
    using Words = typename Halves<N>::Words;
    const Words words = (Words)numbers;
    const Words rounded = words + 0x7fff + ((words >> 16) & 1);
    Halves<N>::store(to, (numbers == numbers ? rounded : (words | 0x400000)) >> 16);
}

#ifdef __F16C__

template <int N>
GRAPNET_INLINE typename Halves<N>::Floats widened(const Float16* from) {
    using Floats = typename Halves<N>::Floats;
#ifdef __AVX512F__
    if constexpr (N == 16)
        return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
    if constexpr (N == 8) return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    if constexpr (N == 4) return (Floats)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

template <int N>
GRAPNET_INLINE void narrow(typename Halves<N>::Floats numbers, Float16* to) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#ifdef __AVX512F__
    if constexpr (N == 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, (__m512)numbers, nearest));
#endif
    if constexpr (N == 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)numbers, nearest));
    if constexpr (N == 4)
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_cvtps_ph((__m128)numbers, nearest));
}

#else

// The exponent of a float is larger by 112; the product adds that and brings numbers below the normal ones into form.
template <int N>
GRAPNET_INLINE typename Halves<N>::Floats widened(const Float16* from) {
    using Words = typename Halves<N>::Words;
    using Floats = typename Halves<N>::Floats;
    const Words given = Halves<N>::words(from), magnitude = (given & 0x7fff) << 13;
    const Words finite = (Words)((Floats)magnitude * 0x1p112f);
    const Words number = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000) : finite;
    return (Floats)(number | (given & 0x8000) << 16);
}

// Numbers below the normal ones are rounded by an addition that leaves their last bit at the end of the mantissa.
template <int N>
GRAPNET_INLINE void narrow(typename Halves<N>::Floats numbers, Float16* to) {
    using Words = typename Halves<N>::Words;
    using Floats = typename Halves<N>::Floats;
    const Words given = (Words)numbers, magnitude = given & 0x7fffffff;
    const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
    const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Words nothing = {};
    const Words large = magnitude > 0x7f800000 ? nothing + 0x7e00 : nothing + 0x7c00;  // NaN, or infinite
    const Words finite = magnitude < (113u << 23) ? small : normal;
    Halves<N>::store(to, (magnitude >= (143u << 23) ? large : finite) | (given & 0x80000000) >> 16);
}

#endif

// One number in the type that it is summed up in.
template <class A>
GRAPNET_INLINE A widened(A number) {
    return number;
}
GRAPNET_INLINE float widened(BFloat16 number) {
    const BFloat16 numbers[4] = {number};
    return widened<4>(numbers)[0];
}
GRAPNET_INLINE float widened(Float16 number) {
    const Float16 numbers[4] = {number};
    return widened<4>(numbers)[0];
}

// Stores a sum as a number of type A.
template <class A>
GRAPNET_INLINE void put(Sums<A> sum, A* to) {
    if constexpr (sizeof(A) == sizeof(Sums<A>)) {
        *to = sum;
    } else {
        A numbers[4];
        narrow<4>(typename Halves<4>::Floats{sum}, numbers);
        *to = numbers[0];
    }
}

}  // namespace
}  // namespace grapnet
