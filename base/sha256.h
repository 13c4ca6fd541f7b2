// SHA-256 (FIPS 180-4), for manifests and for comparing runs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace hierad {

class Sha256 {
 public:
  Sha256();
  void Update(const void* data, size_t size);
  void Update(std::string_view text) { Update(text.data(), text.size()); }
  std::string HexDigest();   // lower case; ends the computation

 private:
  friend class Sha256Test;
  void Block(const uint8_t* block);        // with the processor's SHA instructions where it has them
  void PlainBlock(const uint8_t* block);
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> buffer_;
  uint64_t size_ = 0;
};

std::string Sha256Hex(std::string_view data);
absl::StatusOr<std::string> Sha256OfFile(const std::string& path);

}  // namespace hierad
