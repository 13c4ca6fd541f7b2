#include "worker/comm/agree.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace hierad {
namespace {

struct Verdict {
  int32_t ok = 1;
  int32_t code = 0;
  int32_t reason = 0;
  char message[1012] = {};
};

}  // namespace

absl::Status Agree(Communicator* communicator, const absl::Status& own) {
  absl::Status first;
  for (int r = 0; r < communicator->size(); ++r) {
    Verdict verdict;
    if (r == communicator->rank() && !own.ok()) {
      verdict.ok = 0;
      verdict.code = int32_t(own.code());
      verdict.reason = ReasonOf(own);
      const std::string message(own.message());
      std::memcpy(verdict.message, message.data(), std::min(message.size(), sizeof verdict.message - 1));
    }
    RETURN_IF_ERROR(communicator->BroadcastHost(&verdict, sizeof verdict, r));
    if (verdict.ok != 0 || !first.ok()) continue;
    first = r == communicator->rank() ? own
                                      : ErrorOf(v1::Reason(verdict.reason), absl::StrCat("rank ", r, ": ", verdict.message));
  }
  return first;
}

absl::StatusOr<bool> AnyRank(Communicator* communicator, bool own) {
  bool any = false;
  for (int r = 0; r < communicator->size(); ++r) {
    char theirs = own ? 1 : 0;
    RETURN_IF_ERROR(communicator->BroadcastHost(&theirs, 1, r));
    any = any || theirs != 0;
  }
  return any;
}

absl::StatusOr<DoublePair> SumOverRanks(Communicator* communicator, DoublePair own) {
  DoublePair sum;
  for (int r = 0; r < communicator->size(); ++r) {
    DoublePair theirs = own;
    RETURN_IF_ERROR(communicator->BroadcastHost(&theirs, sizeof theirs, r));
    sum.first += theirs.first;
    sum.second += theirs.second;
  }
  return sum;
}

}  // namespace hierad
