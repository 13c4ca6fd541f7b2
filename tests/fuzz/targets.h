// Each parser as a function of bytes that must neither crash, read beyond its input, nor take more memory than its limits say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hierad {

using FuzzTarget = void (*)(std::string_view input);

struct NamedTarget {
  const char* name;
  FuzzTarget run;
};
const NamedTarget* FuzzTargets(size_t* count);
FuzzTarget FindFuzzTarget(std::string_view name);   // null: there is none

}  // namespace hierad
