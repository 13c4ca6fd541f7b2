// The secret by which a worker proves to be the rank of an attempt.
#pragma once

#include <string>
#include <string_view>

namespace hierad {

// 32 random bytes from the kernel, as lower-case hex.
std::string NewCredential();

// Takes the same time wherever they differ.
bool SameSecret(std::string_view a, std::string_view b);

}  // namespace hierad
