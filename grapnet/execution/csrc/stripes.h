// Stripes: the batch is cut into stripes of samples, and a stripe of activations is packed feature by feature.
//
// A packed stripe is [width, samples of the stripe] without gaps, so that the rows a kernel gathers stay in the cache
// (features that lie a whole batch apart would fall into a few of its sets).
#pragma once

#include "checks.h"
#include "team.h"
#include "vector.h"

namespace grapnet {
namespace {

constexpr Index most_bytes = 4 * GRAPNET_VECTOR_BYTES, least_bytes = 16;  // of one row: four vectors of sums fit
constexpr Index table_bytes = 512 << 10;  // of one packed stripe: half of a common second-level cache
constexpr Index group_bytes = 16 << 20;   // packed before a team meets

// One stripe: `count` samples from `start` on, packed into rows of `bytes` bytes.
struct Stripe {
    Index start, count;
    int bytes;
};

// How a batch is cut; only the last stripe can be narrower.
struct Stripes {
    Index batch, size, count;
    Index number_size;

    Stripes(Index batch, Index rows, Index number_size) : batch(batch), number_size(number_size) {
        Index bytes = most_bytes;
        while (bytes > 64 && bytes * rows > table_bytes) bytes /= 2;
        size = bytes / number_size;
        count = (batch + size - 1) / size;
    }

    Index group(Index rows, int threads) const {
        const Index fit = group_bytes / (rows * size * number_size + 1);
        return threads == 1 ? 1 : least(count, fit > 1 ? fit : 1);
    }

    Stripe operator[](Index number) const {
        const Index start = number * size, samples = least(size, batch - start);
        Index bytes = size * number_size;
        while (bytes > least_bytes && bytes / 2 >= samples * number_size) bytes /= 2;
        return {start, samples, static_cast<int>(bytes)};
    }
};

// What one member of a team does: its stripes, and its share of their rows among those who take the same stripes.
// Members that take whole stripes never read what another one packed, which may lie in the cache of a distant core.
struct Task {
    Range stripes;
    int member, members;

    Task(bool whole_stripes, Index stripes, int member, int members)
        : stripes(whole_stripes ? even_share(stripes, 1, member, members) : Range{0, stripes}),
          member(whole_stripes ? 0 : member), members(whole_stripes ? 1 : members) {}
};

// Whether a team can share out whole stripes without leaving a member idle for long.
inline bool shares_out(const Stripes& stripes, int threads) {
    return threads > 1 && (stripes.count % threads == 0 || stripes.count >= 4 * threads);
}

// Calls body(integral constant of the stripe's bytes).
template <class Body>
auto with_bytes(int bytes, Body body) {
    switch (bytes) {
        case 16: return body(std::integral_constant<int, 16>{});
        case 32: return body(std::integral_constant<int, 32>{});
        case 64: return body(std::integral_constant<int, 64>{});
        case 128: return body(std::integral_constant<int, 128>{});
        default: return body(std::integral_constant<int, 256>{});
    }
}

// Copies features `rows` of one stripe of numbers of type A into packed[feature][sample]; samples that do not exist
// become 0.
template <class A, int Bytes>
void pack(const Matrix& from, Index batch, Index width, const Stripe& stripe, Range rows, Sums<A>* packed) {
    using T = Sums<A>;
    using R = Row<T, Bytes>;
    const A* data = static_cast<const A*>(from.data);
    if (from.by_feature) {
        for (Index f = rows.first; f < rows.last; ++f) {
            const A* source = data + from.start(f, batch) + stripe.start;
            T* target = packed + f * R::size;
            if (stripe.count == R::size) {
                for (int k = 0; k < R::count; ++k) R::store(target + k * R::lanes, R::load(source + k * R::lanes));
            } else {
                for (Index s = 0; s < R::size; ++s) target[s] = s < stripe.count ? widened(source[s]) : T(0);
            }
        }
        return;
    }
    data += stripe.start * width;
    Index f = rows.first;
    for (; f + R::lanes <= rows.last; f += R::lanes)
        for (int s = 0; s < R::size; s += R::lanes) {
            typename R::Vector tile[R::lanes];
            for (int r = 0; r < R::lanes; ++r)
                tile[r] = s + r < stripe.count ? R::load(data + (s + r) * width + f) : typename R::Vector{};
            transpose<R::lanes>(tile);
            for (int r = 0; r < R::lanes; ++r) R::store(packed + (f + r) * R::size + s, tile[r]);
        }
    for (; f < rows.last; ++f)
        for (Index s = 0; s < R::size; ++s)
            packed[f * R::size + s] = s < stripe.count ? widened(data[s * width + f]) : T(0);
}

// Takes the finished rows of one stripe, in ascending order, and writes them in the layout of a matrix of type A.
template <class A, int Bytes>
class Writer {
    using T = Sums<A>;
    using R = Row<T, Bytes>;

  public:
    Writer(const Matrix& to, Index batch, Index width, const Stripe& stripe)
        : data_(static_cast<A*>(to.data)), batch_(batch), width_(width), stripe_(stripe), by_feature_(to.by_feature) {}

    void operator()(Index feature, const typename R::Vector* row) {
        if (by_feature_ && stripe_.count == R::size) {
            A* target = data_ + feature * batch_ + stripe_.start;
            for (int k = 0; k < R::count; ++k) R::store(target + k * R::lanes, row[k]);
            return;
        }
        for (int k = 0; k < R::count; ++k) R::store(block_ + held_ * R::size + k * R::lanes, row[k]);
        if (held_++ == 0) first_ = feature;
        if (held_ == R::lanes) flush();
    }

    void flush() {
        if (by_feature_) {
            for (Index f = 0; f < held_; ++f)
                for (Index s = 0; s < stripe_.count; ++s)
                    put(block_[f * R::size + s], data_ + (first_ + f) * batch_ + stripe_.start + s);
        } else if (held_ == R::lanes) {
            for (int s = 0; s < stripe_.count; s += R::lanes) {
                typename R::Vector tile[R::lanes];
                for (int r = 0; r < R::lanes; ++r) tile[r] = R::load(block_ + r * R::size + s);
                transpose<R::lanes>(tile);
                A* target = data_ + (stripe_.start + s) * width_ + first_;
                for (int r = 0; r < R::lanes && s + r < stripe_.count; ++r) R::store(target + r * width_, tile[r]);
            }
        } else {
            for (Index s = 0; s < stripe_.count; ++s)
                for (Index f = 0; f < held_; ++f)
                    put(block_[f * R::size + s], data_ + (stripe_.start + s) * width_ + first_ + f);
        }
        held_ = 0;
    }

  private:
    A* data_;
    Index batch_, width_;
    Stripe stripe_;
    bool by_feature_;
    Index first_ = 0, held_ = 0;
    alignas(64) T block_[R::lanes * R::size];
};

}  // namespace
}  // namespace grapnet
