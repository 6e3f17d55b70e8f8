// The gradients: each parent gathers the packed rows of its children, once for its input and its weights.
#pragma once

#include "stripes.h"

namespace grapnet {
namespace {

// Puts sums in place, or adds them to those of earlier stripes.
template <class T, int Count, class V>
GRAPNET_INLINE void accumulate(T* to, V sums, bool first) {
    if constexpr (Count * sizeof(T) == sizeof(V)) {
        using R = Row<T, int(sizeof(V))>;
        R::store(to, first ? sums : R::load(to) + sums);
    } else {
        for (int q = 0; q < Count; ++q) to[q] = first ? sums[q] : to[q] + sums[q];
    }
}

template <class T, int Bytes>
void bias_stripe(const T* packed, Range children, T* dbias, bool first) {
    using R = Row<T, Bytes>;
    const auto folded = [&](Index j) {
        typename R::Vector total = R::load(packed + j * R::size);
        for (int k = 1; k < R::count; ++k) total += R::load(packed + j * R::size + k * R::lanes);
        return total;
    };
    Index j = children.first;
    for (; j + R::lanes <= children.last; j += R::lanes)
        accumulate<T, R::lanes>(dbias + j, sums_of<R::lanes, R::lanes>([&](auto q) { return folded(j + q); }), first);
    for (; j < children.last; ++j)
        accumulate<T, 1>(dbias + j, sums_of<R::lanes, 1>([&](auto) { return folded(j); }), first);
}

// What one parent collects from the packed rows of its children in one stripe; it lives in registers.
template <class T, int Bytes, bool Inputs, bool Weights>
struct Gather {
    using R = Row<T, Bytes>;
    using V = typename R::Vector;
    static constexpr int chains = R::count >= 4 ? 1 : 4 / R::count;  // independent sums: an addition takes four cycles

    const T *values, *dz;
    const std::int32_t* child;
    T* dw;
    bool first;
    V x[R::count], dx[chains][R::count];

    // Takes the relation e, adds to dx, and returns the products that sum up to its dw.
    template <int Chain>
    GRAPNET_INLINE V products(Index e) {
        const T* row = dz + child[e] * Index(R::size);
        V weight{}, total{};
        if constexpr (Inputs) weight = R::splat(values[e]);
#pragma GCC unroll 16
        for (int k = 0; k < R::count; ++k) {
            const V d = R::load(row + k * R::lanes);
            if constexpr (Inputs) dx[Chain][k] += d * weight;
            if constexpr (Weights) total += d * x[k];
        }
        return total;
    }

    // Takes relations e to e + Count; Count is a power of two, at most the lanes of a vector.
    template <int Count>
    GRAPNET_INLINE void take(Index e) {
        if constexpr (Weights) {
            const auto row = [&](auto q) __attribute__((always_inline)) { return products<q % chains>(e + q); };
            accumulate<T, Count>(dw + e, sums_of<R::lanes, Count>(row), first);
        } else {
            take_each(e, Lanes<Count>{});
        }
    }

    template <int... Q>
    GRAPNET_INLINE void take_each(Index e, std::integer_sequence<int, Q...>) {
        (products<Q % chains>(e + Q), ...);
    }

    // Takes the fewer than 2 * Count relations that are left.
    template <int Count>
    GRAPNET_INLINE void take_rest(Index e, Index stop) {
        if constexpr (Count > 0) {
            if (e + Count <= stop) {
                take<Count>(e);
                e += Count;
            }
            take_rest<Count / 2>(e, stop);
        }
    }
};

// Returns false at a child that does not exist; only the first stripe looks for one.
template <class A, int Bytes, bool Inputs, bool Weights>
bool gradient_stripe(const Gradients& g, const Stripe& stripe, const Sums<A>* x, const Sums<A>* dz, Range parents,
                     Sums<A>* dw, bool first) {
    using T = Sums<A>;
    using R = Row<T, Bytes>;
    const Below children(g.wiring.children);
    [[maybe_unused]] const T* offsets = static_cast<const T*>(g.offsets);
    Writer<A, Bytes> write(g.dx, g.batch, g.wiring.parents, stripe);
    for (Index i = parents.first; i < parents.last; ++i) {
        Gather<T, Bytes, Inputs, Weights> gather{
            static_cast<const T*>(g.values), dz, g.wiring.child, dw, first, {}, {}};
        if constexpr (Weights)
            for (int k = 0; k < R::count; ++k) gather.x[k] = R::load(x + i * R::size + k * R::lanes);
        Index e = g.wiring.ptr[i];
        const Index stop = g.wiring.ptr[i + 1];
        for (; e + R::lanes <= stop; e += R::lanes) {
            if (first && !children.has_vector<R::lanes>(g.wiring.child + e)) return false;
            gather.template take<R::lanes>(e);
        }
        if (first && !children.has_all(g.wiring.child + e, stop - e)) return false;
        gather.template take_rest<R::lanes / 2>(e, stop);
        if constexpr (Inputs) {
            for (int c = 1; c < gather.chains; ++c)
                for (int k = 0; k < R::count; ++k) gather.dx[0][k] += gather.dx[c][k];
            if (offsets != nullptr)
                for (int k = 0; k < R::count; ++k) gather.dx[0][k] += R::splat(offsets[i]);
            write(i, gather.dx[0]);
        }
    }
    if constexpr (Inputs) write.flush();
    return true;
}

// Adds to `sums` what the other members of a team summed up, [members - 1, size], each its share.
template <class T>
void add_partial_sums(T* sums, const T* partial, Index stride, Index size, int member, int members) {
    const Range share = even_share(size, 16, member, members);
    for (int other = 1; other < members; ++other, partial += stride)
        for (Index n = share.first; n < share.last; ++n) sums[n] += partial[n];
}

template <class A, bool Inputs, bool Weights>
bool gradient_stripes(const Gradients& g) {
    using T = Sums<A>;
    const Wiring& wiring = g.wiring;
    const int threads = useful_threads(g.threads, double(wiring.relations + wiring.children) * double(g.batch));
    const Stripes stripes(g.batch, wiring.children, sizeof(T));
    const Index x_size = Weights ? wiring.parents * stripes.size : 0, dz_size = wiring.children * stripes.size;
    const bool few_sums = !Weights || wiring.relations * threads <= g.batch * (wiring.parents + wiring.children);
    const bool whole = !g.dz.by_feature && few_sums && shares_out(stripes, threads);
    const Index group = whole ? 1 : stripes.group(wiring.parents + wiring.children, threads);
    const Index tables_size = (x_size + dz_size) * (whole ? threads : group);
    const Index sums_size = Weights && whole ? wiring.relations + wiring.children : 0;  // of every member but one
    T* tables = static_cast<T*>(scratch(sizeof(T) * (tables_size + sums_size * (threads - 1))));
    Flag wrong;
    run_team(threads, [&](int member, int members) {
        const Task task(whole, stripes.count, member, members);
        const Range children = even_share(wiring.children, 16, task.member, task.members);
        const Range packed_parents = even_share(wiring.parents, 16, task.member, task.members);
        const Range parents = balanced_share(wiring.ptr, wiring.parents, task.member, task.members);
        T* packed = whole ? tables + (x_size + dz_size) * member : tables;
        T *dw = static_cast<T*>(g.dw), *dbias = static_cast<T*>(g.dbias), *partial = tables + tables_size;
        if (sums_size > 0 && member > 0) {
            dw = partial + sums_size * (member - 1);
            dbias = dw + wiring.relations;
        }
        const auto each = [&](Index first, auto body) {
            for (Index s = first; s < least(first + group, task.stripes.last); ++s) {
                T* dz = packed + (s - first) * (x_size + dz_size);
                with_bytes(stripes[s].bytes, [&](auto bytes) { body(bytes, stripes[s], dz + dz_size, dz); });
            }
        };
        const Index start = stripes[task.stripes.first].start;
        bool sound = true;  // a member that has met a wrong child still meets the team
        for (Index first = task.stripes.first; first < task.stripes.last; first += group) {
            if (first > task.stripes.first && task.members > 1) wait_for_team();
            each(first, [&](auto bytes, const Stripe& stripe, T* x, T* dz) {
                pack<A, bytes>(g.dz, g.batch, wiring.children, stripe, children, dz);
                if constexpr (Weights) {
                    bias_stripe<T, bytes>(dz, children, dbias, stripe.start == start);
                    pack<A, bytes>(g.x, g.batch, wiring.parents, stripe, packed_parents, x);
                }
            });
            if (task.members > 1) wait_for_team();
            each(first, [&](auto bytes, const Stripe& stripe, const T* x, const T* dz) {
                const bool is_first = stripe.start == start;
                sound = sound && gradient_stripe<A, bytes, Inputs, Weights>(g, stripe, x, dz, parents, dw, is_first);
            });
        }
        if (!sound) wrong.raise();
        if (sums_size == 0) return;
        wait_for_team();
        add_partial_sums(static_cast<T*>(g.dw), partial, sums_size, wiring.relations, member, members);
        const T* partial_bias = partial + wiring.relations;
        add_partial_sums(static_cast<T*>(g.dbias), partial_bias, sums_size, wiring.children, member, members);
    });
    return !wrong.raised();
}

// One sample: nothing to sum over the batch.
template <class A, bool Inputs, bool Weights>
bool gradient_single(const Gradients& g) {
    using T = Sums<A>;
    const Wiring& wiring = g.wiring;
    const A *x = static_cast<const A*>(g.x.data), *dz = static_cast<const A*>(g.dz.data);
    const T *values = static_cast<const T*>(g.values), *offsets = static_cast<const T*>(g.offsets);
    A* dx = static_cast<A*>(g.dx.data);
    T *dw = static_cast<T*>(g.dw), *dbias = static_cast<T*>(g.dbias);
    if constexpr (Weights)
        for (Index j = 0; j < wiring.children; ++j) dbias[j] = widened(dz[j]);
    Flag wrong;
    run_team(useful_threads(g.threads, double(wiring.relations)), [&](int member, int members) {
        const Range parents = balanced_share(wiring.ptr, wiring.parents, member, members);
        const Below children(wiring.children);
        for (Index i = parents.first; i < parents.last; ++i) {
            T total[4] = {};  // independent sums
            [[maybe_unused]] T signal{};
            if constexpr (Weights) signal = widened(x[i]);
            const auto take = [&](Index e, int chain) {
                const T d = widened(dz[wiring.child[e]]);
                if constexpr (Inputs) total[chain] += d * values[e];
                if constexpr (Weights) dw[e] = d * signal;
            };
            Index e = wiring.ptr[i];
            const Index stop = wiring.ptr[i + 1];
            for (; e + 4 <= stop; e += 4) {
                if (!children.has_vector<4>(wiring.child + e)) return wrong.raise();
                for (int chain = 0; chain < 4; ++chain) take(e + chain, chain);
            }
            for (; e < stop; ++e) {
                if (!children.has(wiring.child[e])) return wrong.raise();
                take(e, 0);
            }
            if constexpr (Inputs) {
                T sum = (total[0] + total[1]) + (total[2] + total[3]);
                if (offsets != nullptr) sum += offsets[i];
                put(sum, dx + i);
            }
        }
    });
    return !wrong.raised();
}

template <class A, bool Inputs, bool Weights>
bool chosen_gradients(const Gradients& g) {
    if (g.batch == 1 && g.dz.shifts == nullptr) return gradient_single<A, Inputs, Weights>(g);
    return gradient_stripes<A, Inputs, Weights>(g);
}

template <class A>
bool gradients_of(const Gradients& g) {
    if (!has_lists(g.wiring) || !g.dz.holds(g.wiring.children, g.batch)) return false;
    if (!g.weights) return chosen_gradients<A, true, false>(g);
    if (!g.inputs) return chosen_gradients<A, false, true>(g);
    return chosen_gradients<A, true, true>(g);
}

}  // namespace
}  // namespace grapnet
