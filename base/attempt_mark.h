// Which attempt a run folder belongs to, written there by hierad at each placement. Ranks of an older attempt that cannot
// hear hierad (their node is cut off from it) but still see the folder end themselves when it no longer names their own.
#pragma once

#include <string>
#include <string_view>

#include "base/sha256.h"

namespace hierad {

inline constexpr char kAttemptMarkFile[] = ".attempt";

// A fingerprint of the attempt's credential: unlike numbers it is never used twice.
inline std::string AttemptMark(std::string_view credential) { return Sha256Hex(credential).substr(0, 32); }

}  // namespace hierad
