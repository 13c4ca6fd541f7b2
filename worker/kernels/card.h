// The process's card, as far as launches depend on it.
#pragma once

#include <cstdint>

namespace hierad::kernels {

struct Card {
  int capability = 0;      // 90: 9.0
  int sm_count = 1;        // multiprocessors
  int shared_bytes = 48 << 10;   // of shared memory that a block may ask for
};
const Card& ThisCard();

}  // namespace hierad::kernels
