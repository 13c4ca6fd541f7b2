// Initial parameters as FAIR draws them, from counter-based streams: parameter i of the table has its own stream, so its
// values depend on nothing but (seed, i). Free of torch.
#pragma once

#include <cstdint>

#include "base/plan/parameters.h"

namespace hierad {

// Fills flat[0, table.flat_size); padding becomes 0.
void InitializeParameters(const ParameterTable& table, uint64_t seed, float* flat);

}  // namespace hierad
