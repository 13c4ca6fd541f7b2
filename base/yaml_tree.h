// YAML as a plain tree with line numbers: the one adapter to yaml-cpp, whose exceptions end here. Strict: one document,
// UTF-8, no control characters, a largest size and depth; anchors, aliases and tags are refused at their place, so
// that the reader of the tree can name the key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace hierad {

struct YamlEntry;
struct YamlNode {
  enum Kind { kNull, kScalar, kList, kMap, kRefused };
  Kind kind = kNull;
  int line = 0;                 // 1-based
  std::string text;             // of a scalar; of a refused node: why
  bool quoted = false;
  std::vector<YamlNode> items;                          // of a list
  std::vector<YamlEntry> entries;                       // of a map, in order, doubled keys included
};
struct YamlEntry {
  YamlNode key, value;
};

// InvalidArgument: `file_name:line: problem`. An empty document is kNull.
absl::StatusOr<YamlNode> ParseYamlTree(std::string_view text, const std::string& file_name, int64_t max_bytes,
                                       int max_depth);

// `text` as a YAML scalar that reads back as the same string: plain where that is safe, else in double quotes.
std::string YamlQuoted(std::string_view text);

}  // namespace hierad
