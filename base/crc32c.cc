#include "base/crc32c.h"

#include <array>

namespace hierad {
namespace {

constexpr std::array<uint32_t, 256> Table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? 0x82F63B78u : 0u);
    table[byte] = sum;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = Table();

}  // namespace

uint32_t Crc32c(std::string_view data, uint32_t before) {
  uint32_t sum = ~before;
  for (const char c : data) sum = kTable[(sum ^ static_cast<unsigned char>(c)) & 0xFF] ^ (sum >> 8);
  return ~sum;
}

}  // namespace hierad
