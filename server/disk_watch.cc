#include "server/disk_watch.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/fs.h"

namespace hierad {
namespace {

std::string Gib(int64_t bytes) { return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1 << 30)); }

}  // namespace

std::string DiskWatch::Problem(const std::string& folder, std::chrono::nanoseconds now) {
  if (reserve_bytes_ <= 0) return "";
  std::string there = folder;
  while (there.size() > 1 && !Exists(there)) there = FolderOf(there);
  if (looks_.size() > kFolders) looks_.clear();
  Look& look = looks_[there];
  if (look.at.count() != 0 && now - look.at < kLookEvery) return look.problem;
  look.at = now;
  look.problem.clear();
  const auto free = measure_(there);
  if (free.ok() && *free < reserve_bytes_) {
    look.problem = absl::StrCat("the disk of \"", Printable(there), "\" is nearly full: ", Gib(*free), " are free, below disk_reserve_gib (",
                                Gib(reserve_bytes_), "); make room (hierctl gc --dry-run shows what may go)");
  }
  return look.problem;
}

}  // namespace hierad
