// Algorithms of matrix products, chosen by measurement: a line a shape, "<GemmShape::Key> <algorithm in hex>". A table holds for
// one card and one version of the library. Committed tables (base/plan/products.h) are taken first; what `Tune` finds on this
// machine is kept in the user's cache folder, and goes before them.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace hierad::kernels {

class AlgorithmTable {
 public:
  // `row_bytes`: of an algorithm. Rows read later go before earlier ones. Errors: a row of another size.
  absl::Status Read(const std::string& text, size_t row_bytes, bool measured_here);
  void KeepMeasured(const std::string& key, const std::string& algorithm);
  void Forget(const std::string& key) { rows_.erase(key); }
  const std::string* Find(const std::string& key) const;   // nullptr: the library chooses
  size_t size() const { return rows_.size(); }
  // As text, what was measured on this machine alone: a committed row must not lie in the cache, where it would go before a newer one.
  std::string Measured() const;
  // Of the rows of these shapes: the same hash, the same algorithms.
  std::string HashOf(const std::vector<std::string>& keys) const;

 private:
  std::map<std::string, std::string> rows_;   // key -> the algorithm's bytes
  std::set<std::string> measured_;            // keys
};

// Of the current device and the loaded library: "NVIDIA-H200.cublasLt-130100".
std::string AlgorithmTableName();
// Empty: there is none. Errors: it is there and cannot be read.
absl::StatusOr<std::string> CachedAlgorithms(const std::string& name);
std::string CachedAlgorithmsFile(const std::string& name);   // empty: the environment names no place
// Into $HIERAD_CACHE, or hierad/ in $XDG_CACHE_HOME or ~/.cache. Errors: none of these is set, or the file cannot be written.
absl::Status CacheAlgorithms(const std::string& name, const std::string& text);

}  // namespace hierad::kernels
