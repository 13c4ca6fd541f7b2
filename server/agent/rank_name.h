// Which rank of which attempt: the key of everything the agent keeps, and its spelling "job.attempt.rank" in file names
// and in the environment of the rank's processes.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace hierad {

struct RankName {
  uint64_t job_id = 0;
  int32_t attempt = 0;
  int32_t rank = 0;

  auto operator<=>(const RankName&) const = default;
  std::string ToString() const;
  static std::optional<RankName> Parse(std::string_view text);

  // Of an Assignment, RankId or RankProcess.
  template <typename Message>
  static RankName Of(const Message& m) {
    return {m.job_id(), m.attempt(), m.rank()};
  }
};

// Set for every process of a rank, as "job.attempt.rank.AGENT" with the agent's identity: what outlived its keeper and
// its agent is found by it.
inline constexpr char kRankVariable[] = "HIERAD_ATTEMPT";

}  // namespace hierad
