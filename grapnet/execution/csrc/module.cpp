// The Python module: plain functions over addresses. Whoever calls them has checked type and length of every tensor;
// the numbers in them are checked here: a function returns False, or -1, when an index leads out of a buffer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "wiring.h"

#ifdef GRAPNET_X86
#include <cpuid.h>
#endif

namespace nb = nanobind;

namespace grapnet {

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

#ifdef GRAPNET_X86
// Says whether the machine has instructions that convert float16 (F16C), which not every compiler can be asked by name.
bool converts_halves() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// The variants that this machine can run, the fastest first.
std::vector<const Variant*> available() {
    std::vector<const Variant*> found;
#ifdef GRAPNET_X86
    const bool halves = converts_halves();
    if (halves && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.push_back(&avx512);
    if (halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2);
#endif
    found.push_back(&baseline);
    return found;
}

const Variant* chosen = available().front();

std::vector<std::string> variants() {
    std::vector<std::string> names;
    for (const Variant* variant : available()) names.push_back(variant->name);
    return names;
}

void use_variant(const std::string& name) {
    for (const Variant* variant : available())
        if (variant->name == name) {
            chosen = variant;
            return;
        }
    throw std::invalid_argument("this machine cannot run the kernels called " + name);
}

Wiring wiring_of(Address ptr, Address child, Index parents, Index children, Index relations) {
    return {at<const std::int32_t>(ptr), at<const std::int32_t>(child), parents, children, relations};
}

bool py_sum(Address x, bool x_by_feature, Address values, Address bias, Address ptr, Address child, Address in_ptr,
            Address entries, bool wide, Address z, bool z_by_feature, Index batch, Index parents, Index children,
            Index relations, int number, int threads, bool by_child) {
    return chosen->sum({{at<void>(x), x_by_feature},
                 {at<void>(z), z_by_feature},
                 at<void>(values),
                 at<void>(bias),
                 wiring_of(ptr, child, parents, children, relations),
                 {at<const std::int32_t>(in_ptr), at<void>(entries), wide},
                 batch,
                 threads,
                 static_cast<Number>(number),
                 by_child});
}

bool py_gradients(Address x, bool x_by_feature, Address dz, bool dz_by_feature, Address values, Address offsets,
                  Address ptr, Address child, Address dx, bool dx_by_feature, Address dw, Address dbias, bool inputs,
                  bool weights, Index batch, Index parents, Index children, Index relations, int number,
                  int threads, Address shifts, Index n_shifts, Index stride, Index size) {
    return chosen->gradients({{at<void>(x), x_by_feature},
                       {at<void>(dz), dz_by_feature, at<const std::int32_t>(shifts), n_shifts, stride, size},
                       {at<void>(dx), dx_by_feature},
                       at<void>(values),
                       at<void>(offsets),
                       at<void>(dw),
                       at<void>(dbias),
                       inputs,
                       weights,
                       wiring_of(ptr, child, parents, children, relations),
                       batch,
                       threads,
                       static_cast<Number>(number)});
}

Index py_largest_of_rows(Address values, Address ptr, Address starts, Address positions, double least, Index rows,
                         Index size, Index room, bool is_double, int threads) {
    return chosen->largest({at<void>(values), at<const std::int32_t>(ptr), at<const std::int32_t>(starts),
                            at<std::int32_t>(positions), least, rows, size, room, threads, is_double});
}

bool py_order_by_child(Address ptr, Address child, Index parents, Index children, Index relations, bool wide,
                       Address in_ptr, Address entries) {
    return order_by_child(wiring_of(ptr, child, parents, children, relations), wide, at<std::int32_t>(in_ptr),
                          at<void>(entries));
}

bool py_order_without(Address ptr, Address child, Index parents, Index children, Index relations, Address old_in_ptr,
                      Address old_entries, bool wide, Address removed, Index n_removed, Address in_ptr,
                      Address entries) {
    return order_without(wiring_of(ptr, child, parents, children, relations),
                  {at<const std::int32_t>(old_in_ptr), at<void>(old_entries), wide}, at<const std::int32_t>(removed),
                  n_removed, at<std::int32_t>(in_ptr), at<void>(entries));
}

bool py_family_hashes(Address ptr, Address child, Index parents, Index relations, Address hashes, int threads) {
    return family_hashes(wiring_of(ptr, child, parents, 0, relations), threads, at<std::uint64_t>(hashes));
}

bool py_fill(Address values, Address ptr, Address child, Index parents, Index children, Index relations,
             Address cells, bool transposed, int number_size, int threads) {
    return fill(wiring_of(ptr, child, parents, children, relations), {at<void>(cells), transposed, number_size},
                at<void>(values), threads);
}

bool py_pick(Address values, Address ptr, Address child, Index parents, Index children, Index relations,
             Address cells, bool transposed, int number_size, int threads) {
    return pick(wiring_of(ptr, child, parents, children, relations), {at<void>(cells), transposed, number_size},
                at<void>(values), threads);
}

}  // namespace

NB_MODULE(_kernels, m) {
    const auto release = nb::call_guard<nb::gil_scoped_release>();
    m.def("variants", &variants, "Returns the variants that this machine can run, the fastest first.");
    m.def("use_variant", &use_variant, nb::arg("name"), "Runs one variant from now on.");
    m.def("sum", &py_sum, release);
    m.def("gradients", &py_gradients, release, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg(), nb::arg(), nb::arg() = 0, nb::arg() = 1, nb::arg() = 0, nb::arg() = 0);
    m.def("largest_of_rows", &py_largest_of_rows, release);
    m.def("order_by_child", &py_order_by_child, release);
    m.def("order_without", &py_order_without, release);
    m.def("family_hashes", &py_family_hashes, release);
    m.def("fill", &py_fill, release);
    m.def("pick", &py_pick, release);
}

}  // namespace grapnet
