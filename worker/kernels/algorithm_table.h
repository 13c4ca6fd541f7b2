// Algorithms of matrix products, chosen by measurement: a line a shape, "<GemmShape::Key> <algorithm in hex>". A table holds for
// one card and one version of the library. Committed tables (base/plan/products.h) are taken first; what `Tune` finds on this
// machine is kept in the user's cache folder, and goes before them.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace hierad::kernels {

// Of the current device and the loaded library: "NVIDIA-H200.cublasLt-130100".
std::string AlgorithmTableName();
// Empty: there is none.
std::string CachedAlgorithms(const std::string& name);
std::string CachedAlgorithmsFile(const std::string& name);   // empty: the environment names no place
// Into $HIERAD_CACHE, or hierad/ in $XDG_CACHE_HOME or ~/.cache. Errors: none of these is set, or the file cannot be written.
absl::Status CacheAlgorithms(const std::string& name, const std::string& text);

}  // namespace hierad::kernels
