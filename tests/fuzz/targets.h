// Each parser, and the API, as a function of bytes that must neither crash, read beyond its input, nor take more memory than its
// limits say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hierad {

using FuzzTarget = void (*)(std::string_view input);

struct NamedTarget {
  const char* name;
  FuzzTarget run;
};
std::vector<NamedTarget> FuzzTargets();
FuzzTarget FindFuzzTarget(std::string_view name);   // null: there is none

// api_targets.cc
extern const NamedTarget kApiTargets[3];
std::optional<std::string> MutateApiInput(std::string_view target, std::string_view input, unsigned seed);   // none: of another target
std::vector<std::pair<std::string, std::string>> ApiSeeds();   // TARGET/NAME and content

}  // namespace hierad
