// One variant of the kernels; compiled once for every instruction set, with GRAPNET_VARIANT as its name.
#include "gradients.h"
#include "largest.h"
#include "sum.h"

namespace grapnet {

#define GRAPNET_TEXT_OF(name) #name
#define GRAPNET_TEXT(name) GRAPNET_TEXT_OF(name)

const Variant GRAPNET_VARIANT = {
    GRAPNET_TEXT(GRAPNET_VARIANT),
    [](const Sum& sum) { return sum.is_double ? sum_of<double>(sum) : sum_of<float>(sum); },
    [](const Gradients& g) { return g.is_double ? gradients_of<double>(g) : gradients_of<float>(g); },
    [](const Largest& l) { return l.is_double ? largest_of_rows<double>(l) : largest_of_rows<float>(l); },
};

}  // namespace grapnet
