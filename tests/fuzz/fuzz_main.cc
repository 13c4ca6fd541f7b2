// libFuzzer's entry: the program is called fuzz_<target>, by links to one file.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "tests/fuzz/targets.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

namespace {

std::string name;
hierad::FuzzTarget target = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char*** argv) {
  name = (*argv)[0];
  name.erase(0, name.rfind('/') + 1);
  if (name.rfind("fuzz_", 0) == 0) target = hierad::FindFuzzTarget(name.erase(0, 5));
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

// Half of the changes are libFuzzer's own.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  const auto changed = seed % 2 == 0 ? std::nullopt : hierad::MutateApiInput(name, {reinterpret_cast<const char*>(data), size}, seed / 2);
  if (!changed || changed->size() > most) return LLVMFuzzerMutate(data, size, most);
  std::memcpy(data, changed->data(), changed->size());
  return changed->size();
}
