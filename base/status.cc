#include "base/status.h"

#include <optional>
#include <string>

#include "absl/strings/cord.h"

namespace hierad {
namespace {

constexpr char kReasonUrl[] = "hierad/reason";

absl::StatusCode CodeOf(v1::Reason reason) {
  switch (reason) {
    case v1::REASON_USER_ERROR: return absl::StatusCode::kInvalidArgument;
    case v1::REASON_DATA_ERROR: return absl::StatusCode::kDataLoss;
    case v1::REASON_CANCELLED: return absl::StatusCode::kCancelled;
    case v1::REASON_HOST_OOM:
    case v1::REASON_CUDA_OOM: return absl::StatusCode::kResourceExhausted;
    case v1::REASON_PEER_LOST:
    case v1::REASON_NODE_LOST: return absl::StatusCode::kUnavailable;
    case v1::REASON_HANG: return absl::StatusCode::kDeadlineExceeded;
    case v1::REASON_PREEMPTED: return absl::StatusCode::kAborted;
    default: return absl::StatusCode::kInternal;
  }
}

std::optional<v1::Reason> CarriedReason(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  v1::Reason reason;
  if (!payload || !v1::Reason_Parse(std::string(*payload), &reason)) return std::nullopt;
  return reason;
}

}  // namespace

absl::Status ErrorOf(v1::Reason reason, std::string_view message) {
  absl::Status status(CodeOf(reason), std::string(message));
  status.SetPayload(kReasonUrl, absl::Cord(v1::Reason_Name(reason)));
  return status;
}

v1::Reason ReasonOf(const absl::Status& status) {
  if (status.ok()) return v1::REASON_COMPLETED;
  if (const auto reason = CarriedReason(status)) return *reason;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kFailedPrecondition: return v1::REASON_USER_ERROR;
    case absl::StatusCode::kDataLoss: return v1::REASON_DATA_ERROR;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded: return v1::REASON_PEER_LOST;
    case absl::StatusCode::kCancelled: return v1::REASON_CANCELLED;
    default: return v1::REASON_CRASHED;
  }
}

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), std::string(context) + ": " + std::string(status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

}  // namespace hierad
