// The forward sum: each child gathers the packed rows of its parents.
#pragma once

#include "stripes.h"

namespace grapnet {
namespace {

constexpr Index few_bytes = 64;  // of one feature, up to which the sum goes by parent

template <class Entry>
struct Split {
    static constexpr int half = 4 * int(sizeof(Entry));
    static Index parent(Entry entry) { return static_cast<Index>(entry >> half); }
    static Entry slot_bits(Entry entry) { return entry & ((Entry(1) << half) - 1); }
    static Index slot(Entry entry) { return static_cast<Index>(slot_bits(entry)); }
};

// Finds entries whose parent or position may not exist. An entry is plain when its slot is one that some parent has,
// and its parent owns relations so far from the end that any such slot exists. Only the last few parents are not so.
template <class Entry>
class Plain {
  public:
    explicit Plain(const Wiring& wiring) {
        std::int32_t most = 0;
        for (Index i = 0; i < wiring.parents; ++i) {
            const std::int32_t degree = wiring.ptr[i + 1] - wiring.ptr[i];
            most = degree > most ? degree : most;
        }
        Index parents = wiring.parents;
        while (parents > 0 && wiring.ptr[parents - 1] + Index(most) > wiring.relations) --parents;
        slots_ = static_cast<Entry>(most);
        end_ = static_cast<Entry>(parents) << Split<Entry>::half;
    }

    // Says whether all of `count` entries are plain; a loop without branches over whole vectors.
    bool has_all(const Entry* entries, Index count) const {
        Entry others = 0;
        for (Index n = 0; n < count; ++n)
            others |= (entries[n] >= end_) | (Split<Entry>::slot_bits(entries[n]) >= slots_);
        return others == 0;
    }

  private:
    Entry slots_, end_;
};

// Copies the weights of a range of children into their order, since every stripe reads them. Returns false at an entry
// whose parent or position does not exist.
template <class T, class Entry>
bool gather_weights(const Sum& sum, Range children, T* weights) {
    constexpr Index block = 64;
    const Wiring& wiring = sum.wiring;
    const Entry* entries = static_cast<const Entry*>(sum.order.entries);
    const T* values = static_cast<const T*>(sum.values);
    const Plain<Entry> plain(wiring);
    const auto gather = [&](Index e) {
        weights[e] = values[wiring.ptr[Split<Entry>::parent(entries[e])] + Split<Entry>::slot(entries[e])];
    };
    Index e = sum.order.in_ptr[children.first];
    const Index stop = sum.order.in_ptr[children.last];
    while (e < stop) {
        if (e + block <= stop && plain.has_all(entries + e, block)) {
            for (const Index end = e + block; e < end; ++e) gather(e);
            continue;
        }
        for (const Index end = least(e + block, stop); e < end; ++e) {
            const Index parent = Split<Entry>::parent(entries[e]);
            if (parent >= wiring.parents) return false;
            if (wiring.ptr[parent] + Split<Entry>::slot(entries[e]) >= wiring.relations) return false;
            gather(e);
        }
    }
    return true;
}

// Says whether the parents of a range of children exist.
template <class Entry>
bool parents_exist(const Sum& sum, Range children) {
    const Entry* entries = static_cast<const Entry*>(sum.order.entries);
    const Entry end = static_cast<Entry>(sum.wiring.parents) << Split<Entry>::half;
    // With as many parents as an entry can name, the bound does not fit in, and no entry reaches it.
    const bool all_fit = Index(end >> Split<Entry>::half) != sum.wiring.parents;
    Entry others = 0;
    for (Index e = sum.order.in_ptr[children.first]; e < sum.order.in_ptr[children.last]; ++e)
        others |= entries[e] >= end;
    return all_fit || others == 0;
}

template <class A, class Entry, int Bytes>
void sum_stripe(const Sum& sum, const Stripe& stripe, const Sums<A>* packed, const Sums<A>* weights, Range children) {
    using T = Sums<A>;
    using R = Row<T, Bytes>;
    using V = typename R::Vector;
    constexpr int chains = R::count >= 4 ? 1 : 4 / R::count;  // independent sums: an addition takes four cycles
    const T* bias = static_cast<const T*>(sum.bias);
    const Entry* entries = static_cast<const Entry*>(sum.order.entries);
    const std::int32_t* in_ptr = sum.order.in_ptr;
    Writer<A, Bytes> write(sum.z, sum.batch, sum.wiring.children, stripe);
    for (Index j = children.first; j < children.last; ++j) {
        V z[chains][R::count] = {};
        const auto add = [&](Index e, V* into) {
            const V weight = R::splat(weights[e]);
            const T* row = packed + Split<Entry>::parent(entries[e]) * R::size;
            for (int k = 0; k < R::count; ++k) into[k] += R::load(row + k * R::lanes) * weight;
        };
        Index e = in_ptr[j];
        const Index stop = in_ptr[j + 1];
        for (; e + chains <= stop; e += chains)
            for (int c = 0; c < chains; ++c) add(e + c, z[c]);
        for (; e < stop; ++e) add(e, z[0]);
        for (int c = 1; c < chains; ++c)
            for (int k = 0; k < R::count; ++k) z[0][k] += z[c][k];
        for (int k = 0; k < R::count; ++k) z[0][k] += R::splat(bias[j]);
        write(j, z[0]);
    }
    write.flush();
}

// Adds one parent's messages for one sample. Children come in pairs and products as a vector: what then limits the
// speed is one store a relation. The children of one parent differ, so the updates are independent. Returns false at a
// child that does not exist.
template <class T>
bool scatter_single(const Wiring& wiring, Index parent, T signal, const T* values, T* z) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a pair of children is read as one number");
    using R = Row<T, GRAPNET_VECTOR_BYTES < 32 ? 16 : 32>;
    Index e = wiring.ptr[parent];
    const Index stop = wiring.ptr[parent + 1];
    const Below children(wiring.children);
    for (; e + R::lanes <= stop; e += R::lanes) {
        if (!children.has_vector<R::lanes>(wiring.child + e)) return false;
        const typename R::Vector products = R::load(values + e) * R::splat(signal);
#pragma GCC unroll 8
        for (int k = 0; k < R::lanes; k += 2) {
            std::uint64_t pair;
            __builtin_memcpy(&pair, wiring.child + e + k, sizeof pair);
            z[static_cast<std::uint32_t>(pair)] += products[k];
            z[pair >> 32] += products[k + 1];
        }
    }
    for (; e < stop; ++e) {
        if (!children.has(wiring.child[e])) return false;
        z[wiring.child[e]] += signal * values[e];
    }
    return true;
}

// One sample: by parent, since reading values and children in order costs less than gathering them.
template <class A>
bool sum_single(const Sum& sum) {
    using T = Sums<A>;
    constexpr bool in_place = sizeof(A) == sizeof(T);  // the first member sums up where the result belongs
    const Wiring& wiring = sum.wiring;
    const A* x = static_cast<const A*>(sum.x.data);
    const T *values = static_cast<const T*>(sum.values), *bias = static_cast<const T*>(sum.bias);
    const int threads = useful_threads(sum.threads, double(wiring.relations));
    T* partial = static_cast<T*>(scratch(sizeof(T) * wiring.children * threads));
    T* z = in_place ? static_cast<T*>(sum.z.data) : partial + (threads - 1) * wiring.children;
    Flag wrong;
    run_team(threads, [&](int member, int members) {
        T* own = member == 0 ? z : partial + (member - 1) * wiring.children;
        for (Index j = 0; j < wiring.children; ++j) own[j] = member == 0 ? bias[j] : T(0);
        const Range parents = balanced_share(wiring.ptr, wiring.parents, member, members);
        for (Index i = parents.first; i < parents.last; ++i)
            if (!scatter_single(wiring, i, widened(x[i]), values, own)) {
                wrong.raise();
                break;
            }
        if (members == 1 && in_place) return;
        if (members > 1) wait_for_team();
        const Range share = even_share(wiring.children, 16, member, members);
        for (int other = 1; other < members; ++other)
            for (Index j = share.first; j < share.last; ++j) z[j] += partial[(other - 1) * wiring.children + j];
        if constexpr (!in_place)
            for (Index j = share.first; j < share.last; ++j) put(z[j], static_cast<A*>(sum.z.data) + j);
    });
    return !wrong.raised();
}

// Adds one parent's messages for a few samples to packed rows of z; its children differ: updates are independent.
// Returns false at a child that does not exist.
template <class T, int Bytes>
bool scatter_few(const std::int32_t* child, const std::int32_t* stop, Below children, const T* values, const T* x,
                 T* z) {
    using R = Row<T, Bytes>;
    using V = typename R::Vector;
    V signal[R::count];
    for (int k = 0; k < R::count; ++k) signal[k] = R::load(x + k * R::lanes);
    const auto add = [&](T* row, T value) {
        for (int k = 0; k < R::count; ++k)
            R::store(row + k * R::lanes, R::load(row + k * R::lanes) + signal[k] * value);
    };
    const auto add_four = [&](const std::int32_t* child, const T* values) __attribute__((always_inline)) {
        T* const rows[4] = {z + child[0] * Index(R::size), z + child[1] * Index(R::size),
                            z + child[2] * Index(R::size), z + child[3] * Index(R::size)};
        const T weights[4] = {values[0], values[1], values[2], values[3]};
        for (int q = 0; q < 4; ++q) add(rows[q], weights[q]);
    };
    for (; child + 8 <= stop; child += 8, values += 8) {
        if (!children.has_vector<8>(child)) return false;
        add_four(child, values);
        add_four(child + 4, values + 4);
    }
    if (child + 4 <= stop) {
        if (!children.has_vector<4>(child)) return false;
        add_four(child, values);
        child += 4;
        values += 4;
    }
    for (; child < stop; ++child, ++values) {
        if (!children.has(*child)) return false;
        add(z + *child * Index(R::size), *values);
    }
    return true;
}

// A few samples: by parent too, into a packed z of every member.
template <class A, int Bytes>
bool sum_few(const Sum& sum, const Stripe& stripe) {
    using T = Sums<A>;
    using R = Row<T, Bytes>;
    using V = typename R::Vector;
    const Wiring& wiring = sum.wiring;
    const T *values = static_cast<const T*>(sum.values), *bias = static_cast<const T*>(sum.bias);
    const int threads = useful_threads(sum.threads, double(wiring.relations) * 2);
    const Index size = wiring.children * R::size;
    T* packed = static_cast<T*>(scratch(sizeof(T) * (size * threads + wiring.parents * R::size)));
    T* x = packed + size * threads;
    Flag wrong;
    run_team(threads, [&](int member, int members) {
        T* z = packed + size * member;
        for (Index n = 0; n < size; n += R::lanes) R::store(z + n, V{});
        const Range parents = balanced_share(wiring.ptr, wiring.parents, member, members);
        pack<A, Bytes>(sum.x, sum.batch, wiring.parents, stripe, parents, x);
        for (Index i = parents.first; i < parents.last; ++i) {
            const std::int32_t *first = wiring.child + wiring.ptr[i], *stop = wiring.child + wiring.ptr[i + 1];
            const T* weights = values + wiring.ptr[i];
            if (!scatter_few<T, Bytes>(first, stop, Below(wiring.children), weights, x + i * R::size, z)) {
                wrong.raise();
                break;
            }
        }
        if (members > 1) wait_for_team();
        const Range children = even_share(wiring.children, 16, member, members);
        Writer<A, Bytes> write(sum.z, sum.batch, wiring.children, stripe);
        for (Index j = children.first; j < children.last; ++j) {
            V total[R::count];
            for (int k = 0; k < R::count; ++k) {
                total[k] = R::splat(bias[j]);
                for (int other = 0; other < members; ++other)
                    total[k] += R::load(packed + size * other + j * R::size + k * R::lanes);
            }
            write(j, total);
        }
        write.flush();
    });
    return !wrong.raised();
}

template <class A, class Entry>
bool sum_stripes(const Sum& sum) {
    using T = Sums<A>;
    const Wiring& wiring = sum.wiring;
    if (!is_partition(sum.order.in_ptr, wiring.children, wiring.relations)) return false;
    const int threads = useful_threads(sum.threads, double(wiring.relations + wiring.children) * double(sum.batch));
    const Stripes stripes(sum.batch, wiring.parents, sizeof(T));
    const bool whole = !sum.z.by_feature && shares_out(stripes, threads);
    const Index group = whole ? 1 : stripes.group(wiring.parents, threads);
    const Index packed_size = wiring.parents * stripes.size;
    T* tables = static_cast<T*>(scratch(sizeof(T) * (packed_size * (whole ? threads : group) + wiring.relations)));
    T* own = tables + packed_size * (whole ? threads : group);
    const T* weights = sum.by_child ? static_cast<const T*>(sum.values) : own;
    Flag wrong;
    run_team(threads, [&](int member, int members) {
        const Task task(whole, stripes.count, member, members);
        const Range parents = even_share(wiring.parents, 16, task.member, task.members);
        const Range children = balanced_share(sum.order.in_ptr, wiring.children, task.member, task.members);
        T* packed = whole ? tables + packed_size * member : tables;
        const auto each = [&](Index first, auto body) {
            for (Index s = first; s < least(first + group, task.stripes.last); ++s)
                with_bytes(stripes[s].bytes,
                           [&](auto bytes) { body(bytes, stripes[s], packed + (s - first) * packed_size); });
        };
        const Range gathered = balanced_share(sum.order.in_ptr, wiring.children, member, members);
        const bool sound = sum.by_child ? parents_exist<Entry>(sum, gathered)
                                        : gather_weights<T, Entry>(sum, gathered, own);
        if (!sound) wrong.raise();
        if (whole) wait_for_team();
        for (Index first = task.stripes.first; first < task.stripes.last; first += group) {
            if (first > task.stripes.first && task.members > 1) wait_for_team();
            each(first, [&](auto bytes, const Stripe& stripe, T* table) {
                pack<A, bytes>(sum.x, sum.batch, wiring.parents, stripe, parents, table);
            });
            if (task.members > 1) wait_for_team();
            // Every member has gathered its weights by this point, and no flag is raised after it.
            if (wrong.raised()) continue;
            each(first, [&](auto bytes, const Stripe& stripe, const T* table) {
                sum_stripe<A, Entry, bytes>(sum, stripe, table, weights, children);
            });
        }
    });
    return !wrong.raised();
}

template <class A>
bool sum_of(const Sum& sum) {
    using T = Sums<A>;
    if (!has_lists(sum.wiring)) return false;
    if (sum.batch == 1 && !sum.by_child) return sum_single<A>(sum);
    if (sum.batch > 0 && !sum.by_child && sum.batch * Index(sizeof(T)) <= few_bytes) {
        const Stripe stripe = Stripes(sum.batch, 1, sizeof(T))[0];
        if (stripe.bytes * sum.wiring.children <= table_bytes)
            return with_bytes(stripe.bytes, [&](auto bytes) { return sum_few<A, bytes>(sum, stripe); });
    }
    return sum.order.wide ? sum_stripes<A, std::uint64_t>(sum) : sum_stripes<A, std::uint32_t>(sum);
}

}  // namespace
}  // namespace grapnet
