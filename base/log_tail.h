// Where the end of a log begins.
#pragma once

#include <cstdint>

namespace hierad {

// Where the last `lines` lines of the first `size` bytes begin; an unfinished last line counts.
int64_t TailOffset(int fd, int64_t size, uint64_t lines);

}  // namespace hierad
