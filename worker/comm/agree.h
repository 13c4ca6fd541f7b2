// Agreements between ranks about things on the host, outside of steps. All ranks call them in the same order.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"

namespace hierad {

// OK when every rank's `own` is OK; else, on every rank, the error of the first rank that has one (of the same reason,
// and for the others with "rank N: " before it). A communicator's own error is returned as it is.
absl::Status Agree(Communicator* communicator, const absl::Status& own);

// True on every rank when it is on any.
absl::StatusOr<bool> AnyRank(Communicator* communicator, bool own);

// Adds the ranks' pairs in rank order: the same bits on every rank.
struct DoublePair { double first = 0, second = 0; };
absl::StatusOr<DoublePair> SumOverRanks(Communicator* communicator, DoublePair own);

}  // namespace hierad
