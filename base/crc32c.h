// CRC-32C (Castagnoli, polynomial 0x1EDC6F41, reflected), as SSE4.2, iSCSI and TFRecord compute it. RFC 3720, B.4.
#pragma once

#include <cstdint>
#include <string_view>

namespace hierad {

// `before`: the sum of what stands before `data`, so that pieces can be summed one after the other.
uint32_t Crc32c(std::string_view data, uint32_t before = 0);

}  // namespace hierad
