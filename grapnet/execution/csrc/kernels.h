// What the kernels compute, and how the variants compiled for different instruction sets are reached.
#pragma once

#include <cstddef>
#include <cstdint>

namespace grapnet {

using Index = std::ptrdiff_t;

// The types of activations. Weights, biases and the gradients of both are float with the halves.
enum class Number { float32, float64, bfloat16, float16 };

// A [batch, width] matrix: features lie apart by `batch` values (by_feature) or samples by `width` values. Features with
// shifts are channels that lie apart by `stride` values, each as often as there are shifts and begun so many values
// later: the positions of a kernel that moves over an image. Such a matrix is only read.
struct Matrix {
    void* data;
    bool by_feature;
    const std::int32_t* shifts = nullptr;  // [n_shifts]
    Index n_shifts = 1, stride = 0, size = 0;  // size: how many values there are

    Index start(Index feature, Index batch) const {
        if (shifts == nullptr) return feature * batch;
        return feature / n_shifts * stride + shifts[feature % n_shifts];
    }

    // Says whether `width` features of `batch` samples lie within the memory.
    bool holds(Index width, Index batch) const {
        if (shifts == nullptr) return true;
        if (!by_feature || n_shifts < 1 || stride < 0 || width % n_shifts != 0) return false;
        const Index last = width == 0 ? 0 : (width / n_shifts - 1) * stride;
        for (Index n = 0; n < n_shifts; ++n)
            if (shifts[n] < 0 || last + shifts[n] + batch > size) return false;
        return true;
    }
};

// Relations in the order of their owners: those of parent i are positions ptr[i] to ptr[i + 1].
struct Wiring {
    const std::int32_t* ptr;    // [parents + 1]
    const std::int32_t* child;  // [relations]
    Index parents, children, relations;
};

// The same relations by child: entry = (parent, slot among the parent's relations), sorted by parent.
struct ByChild {
    const std::int32_t* in_ptr;  // [children + 1]
    const void* entries;         // [relations], 16 + 16 bits, or 32 + 32 when wide
    bool wide;
};

// z[b, j] = bias[j] + Σ_i x[b, i] · w_ij
struct Sum {
    Matrix x, z;
    const void *values, *bias;
    Wiring wiring;
    ByChild order;
    Index batch;
    int threads;
    Number number;
    bool by_child = false;  // whether the values are in the order by child; for more samples than a few
};

// dx[b, i] = Σ_j dz[b, j] · w_ij,  dw_ij = Σ_b x[b, i] · dz[b, j],  dbias[j] = Σ_b dz[b, j]
// With an offset for every parent dx is the forward sum of the opposite wiring, and the offsets are its biases.
struct Gradients {
    Matrix x, dz, dx;
    const void *values, *offsets;  // offsets: null for none
    void *dw, *dbias;
    bool inputs, weights;  // wanted: dx needs values, dw and dbias need x
    Wiring wiring;
    Index batch;
    int threads;
    Number number;
};

// The positions of the largest values of every row, ascending; of equals the first.
struct Largest {
    const void* values;
    const std::int32_t *ptr, *starts;  // [rows + 1]: where a row begins, and where its positions have their room
    std::int32_t* positions;           // [room]
    double least;                      // smaller values do not count, nor do NaN
    Index rows, size, room;            // size: how many values there are
    int threads;
    bool is_double;
};

// Every kernel checks the indices it is given, and returns false when one leads out of a buffer; what it wrote is then
// undefined. Nobody may write into the indices while a kernel runs.
struct Variant {
    const char* name;
    bool (*sum)(const Sum&);
    bool (*gradients)(const Gradients&);
    Index (*largest)(const Largest&);  // how many there are, or -1
};

extern const Variant baseline, avx2, avx512;

// Returns memory aligned to a cache line that the calling thread keeps for its next call.
void* scratch(std::size_t bytes);

}  // namespace grapnet
