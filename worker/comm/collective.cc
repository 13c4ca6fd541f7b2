#include "worker/comm/collective.h"

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

std::string Grouped(int64_t n) {
  const std::string digits = absl::StrCat(n);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped += ',';
    grouped += digits[i];
  }
  return grouped;
}

}  // namespace

std::string DescribeCollective(Collective kind, int64_t count) {
  switch (kind) {
    case Collective::kNone: return "";
    case Collective::kAllReduce: return absl::StrCat("all_reduce of ", Grouped(count), " floats");
    case Collective::kBroadcast: return absl::StrCat("broadcast of ", Grouped(count), " bytes");
    case Collective::kBarrier: return "barrier";
    case Collective::kReduceScatter: return absl::StrCat("reduce_scatter of ", Grouped(count), " floats");
    case Collective::kAllGather: return absl::StrCat("all_gather of ", Grouped(count), " bytes a rank");
  }
  return "";
}

std::string DescribeTag(uint64_t tag) {
  return DescribeCollective(Collective(tag >> 60), int64_t(tag & ((uint64_t{1} << 48) - 1)));
}

uint64_t CollectiveTag(Collective kind, int64_t count, int root) {
  return uint64_t(kind) << 60 | uint64_t(root) << 48 | uint64_t(count);
}

std::string MismatchText(int rank, const std::string& own, int other, uint64_t other_tag) {
  return absl::StrCat("rank ", rank, " is in ", own, " but rank ", other, " in ", DescribeTag(other_tag),
                      "; all ranks must call the same collectives");
}

void CollectiveActivity::Enter(Collective kind, int64_t count) {
  std::lock_guard lock(mutex_);
  kind_ = kind;
  count_ = count;
}

void CollectiveActivity::SetActivity(const std::string& activity) {
  std::lock_guard lock(mutex_);
  activity_ = activity;
}

std::string CollectiveActivity::WaitingIn() const {
  std::lock_guard lock(mutex_);
  if (kind_ == Collective::kNone) return "";
  return absl::StrCat(DescribeCollective(kind_, count_), activity_.empty() ? "" : ", ", activity_);
}

}  // namespace hierad
