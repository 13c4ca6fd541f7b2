#include "base/status.h"

#include <gtest/gtest.h>

namespace hierad {
namespace {

TEST(Status, EveryReasonSurvivesAnnotation) {
  for (int i = v1::Reason_MIN + 1; i <= v1::Reason_MAX; ++i) {
    const auto reason = v1::Reason(i);
    const absl::Status status = Annotate(Annotate(ErrorOf(reason, "it broke"), "reading x"), "job 7");
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(ReasonOf(status), reason) << v1::Reason_Name(reason);
    EXPECT_EQ(std::string(status.message()), "job 7: reading x: it broke");
  }
}

TEST(Status, WithoutAReasonTheCodeDecides) {
  EXPECT_EQ(ReasonOf(absl::OkStatus()), v1::REASON_COMPLETED);
  EXPECT_EQ(ReasonOf(absl::InvalidArgumentError("")), v1::REASON_USER_ERROR);
  EXPECT_EQ(ReasonOf(absl::NotFoundError("")), v1::REASON_USER_ERROR);
  EXPECT_EQ(ReasonOf(absl::FailedPreconditionError("")), v1::REASON_USER_ERROR);
  EXPECT_EQ(ReasonOf(absl::DataLossError("")), v1::REASON_DATA_ERROR);
  EXPECT_EQ(ReasonOf(absl::UnavailableError("")), v1::REASON_PEER_LOST);
  EXPECT_EQ(ReasonOf(absl::DeadlineExceededError("")), v1::REASON_PEER_LOST);
  EXPECT_EQ(ReasonOf(absl::CancelledError("")), v1::REASON_CANCELLED);
  EXPECT_EQ(ReasonOf(absl::InternalError("")), v1::REASON_CRASHED);
  EXPECT_EQ(ReasonOf(absl::ResourceExhaustedError("")), v1::REASON_CRASHED);
}

TEST(Status, AnnotatingSuccessIsSuccess) { EXPECT_TRUE(Annotate(absl::OkStatus(), "x").ok()); }

absl::StatusOr<int> Half(int n) {
  if (n % 2) return absl::InvalidArgumentError("odd");
  return n / 2;
}

absl::StatusOr<int> Quarter(int n) {
  ASSIGN_OR_RETURN(const int half, Half(n));
  ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

TEST(Status, MacrosPassErrorsOn) {
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_EQ(Quarter(6).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace hierad
