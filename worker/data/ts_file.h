// UEA/UCR .ts text: '@' headers, then one sample a line: channels separated by ':', values by ',', the class label last.
// Strict: what cannot be used in full is refused with file, line and, for a value, column.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace hierad {

struct TsFile {
  int64_t count = 0, channels = 0, length = 0;
  std::vector<std::string> class_names;   // empty: no labels
  std::vector<int32_t> labels;            // index in class_names; empty: no labels
  std::vector<int32_t> lines;             // 1-based line of each sample
  std::vector<float> values;              // [count, channels, length]
};

struct TsOptions {
  enum class Unequal { kRefuse, kZero, kEdge };
  Unequal unequal = Unequal::kRefuse;   // series shorter than the file's longest: refused, or padded at the end
  bool missing = false;                 // "?" and "NaN" are read as NaN; else refused
};

// `path` is for messages only.
absl::StatusOr<TsFile> ParseTs(std::string_view text, const std::string& path, const TsOptions& options = {});

}  // namespace hierad
