// libFuzzer's entry into one target.
#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const hierad::FuzzTarget target = hierad::FindFuzzTarget(HIERAD_FUZZ_TARGET);
  target({reinterpret_cast<const char*>(data), size});
  return 0;
}
