// libFuzzer's entry: the program is called fuzz_<target>, by links to one file.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tests/fuzz/targets.h"

namespace {

hierad::FuzzTarget target = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char*** argv) {
  std::string_view name((*argv)[0]);
  name.remove_prefix(name.rfind('/') + 1);
  if (name.substr(0, 5) == "fuzz_") target = hierad::FindFuzzTarget(name.substr(5));
  if (target == nullptr) {
    std::fprintf(stderr, "%s: there is no such target; call it by one of the names fuzz_TARGET beside it\n", (*argv)[0]);
    std::exit(1);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  target({reinterpret_cast<const char*>(data), size});
  return 0;
}
