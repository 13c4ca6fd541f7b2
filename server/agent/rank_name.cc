#include "server/agent/rank_name.h"

#include <charconv>

namespace hierad {

std::string RankName::ToString() const {
  return std::to_string(job_id) + "." + std::to_string(attempt) + "." + std::to_string(rank);
}

std::optional<RankName> RankName::Parse(std::string_view text) {
  RankName name;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](auto* value, bool last) {
    const auto [next, error] = std::from_chars(at, end, *value);
    if (error != std::errc() || (last ? next != end : next == end || *next != '.')) return false;
    at = last ? next : next + 1;
    return true;
  };
  if (!number(&name.job_id, false) || !number(&name.attempt, false) || !number(&name.rank, true)) {
    return std::nullopt;
  }
  return name;
}

}  // namespace hierad
