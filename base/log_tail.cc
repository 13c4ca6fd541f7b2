#include "base/log_tail.h"

#include <unistd.h>

#include <algorithm>
#include <string>

namespace hierad {

int64_t TailOffset(int fd, int64_t size, uint64_t lines) {
  std::string block(64 << 10, '\0');
  int64_t end = size;
  uint64_t seen = 0;
  while (end > 0) {
    const int64_t begin = std::max<int64_t>(0, end - static_cast<int64_t>(block.size()));
    const ssize_t got = pread(fd, block.data(), static_cast<size_t>(end - begin), begin);
    if (got <= 0) return begin;
    for (int64_t i = got - 1; i >= 0; --i) {
      if (block[static_cast<size_t>(i)] != '\n' || begin + i == size - 1) continue;   // the last byte ends the last line
      if (++seen == lines) return begin + i + 1;
    }
    end = begin;
  }
  return 0;
}

}  // namespace hierad
