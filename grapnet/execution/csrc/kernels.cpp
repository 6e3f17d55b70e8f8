// One variant of the kernels; compiled once for every instruction set, with GRAPNET_VARIANT as its name.
#include "gradients.h"
#include "largest.h"
#include "sum.h"

namespace grapnet {

#define GRAPNET_TEXT_OF(name) #name
#define GRAPNET_TEXT(name) GRAPNET_TEXT_OF(name)

namespace {

// Calls body(a zero of the type).
template <class Body>
bool with_number(Number number, Body body) {
    switch (number) {
        case Number::float64: return body(double());
        case Number::bfloat16: return body(BFloat16());
        case Number::float16: return body(Float16());
        default: return body(float());
    }
}

}  // namespace

const Variant GRAPNET_VARIANT = {
    GRAPNET_TEXT(GRAPNET_VARIANT),
    [](const Sum& sum) { return with_number(sum.number, [&](auto zero) { return sum_of<decltype(zero)>(sum); }); },
    [](const Gradients& g) { return with_number(g.number, [&](auto zero) { return gradients_of<decltype(zero)>(g); }); },
    [](const Largest& l) { return l.is_double ? largest_of_rows<double>(l) : largest_of_rows<float>(l); },
};

}  // namespace grapnet
