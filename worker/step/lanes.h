// Three streams for one list of operations: the chain; beside it what nobody waits for (Op::beside: weight gradients and
// sums); and the all-reduces, each as soon as its bucket is ready. An operation waits for those of the other streams that it
// shares memory with, as the plan's tensors lie in the arenas; within a stream order is order. So results are those of one
// stream, bit for bit.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/plan/plan.h"

namespace hierad {

class Lanes {
 public:
  enum Lane { kChain, kBeside, kReductions, kNumLanes };

  // The streams outlive this; the same stream twice: nothing runs beside anything there.
  Lanes(const Plan& plan, cudaStream_t chain, cudaStream_t beside, cudaStream_t reductions)
      : plan_(plan), stream_{chain, beside, reductions} {}
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Enqueues those of `ops` that `take` wants through `launch(op, stream, lane)`; when the chain goes on, all of
  // them are over.
  absl::Status Run(absl::Span<const Op> ops, const std::function<bool(const Op&)>& take,
                   const std::function<absl::Status(const Op&, cudaStream_t, int lane)>& launch);

 private:
  struct Range {
    Arena arena;
    int64_t begin, end;
    bool written;
  };
  struct Issued {
    cudaEvent_t done;
    std::vector<Range> ranges;
  };
  int LaneOf(const Op& op) const;
  std::vector<Range> RangesOf(const Op& op) const;
  static bool Meet(const std::vector<Range>& a, const std::vector<Range>& b);
  absl::Status WaitForOthers(const std::vector<Range>& ranges, int lane);
  absl::Status Join(int from, int to);
  absl::StatusOr<cudaEvent_t> NextEvent();

  const Plan& plan_;
  const cudaStream_t stream_[kNumLanes];
  std::vector<cudaEvent_t> events_;
  size_t used_ = 0;
  std::vector<Issued> issued_[kNumLanes];
  size_t waited_[kNumLanes][kNumLanes] = {};   // [lane][other]: operations of the other that the lane has waited for
};

}  // namespace hierad
