// Two streams for one list of operations: the chain, and beside it what nobody waits for (Op::beside: weight gradients and
// sums). An operation waits for those of the other stream that it shares memory with, as the plan's tensors lie in the
// arenas; within a stream order is order. So results are those of one stream, bit for bit.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/plan.h"

namespace hierad {

class Lanes {
 public:
  enum Lane { kChain, kBeside };

  // The streams outlive this; the same stream twice: nothing runs beside anything.
  Lanes(const Plan& plan, cudaStream_t chain, cudaStream_t beside) : plan_(plan), stream_{chain, beside} {}
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Enqueues the first `count` operations through `launch(op, stream, lane)`; when the chain goes on, all of them are over.
  absl::Status Run(const std::vector<Op>& ops, size_t count, const std::function<absl::Status(const Op&, cudaStream_t, int lane)>& launch);

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
  std::vector<Range> RangesOf(const Op& op) const;
  static bool Meet(const std::vector<Range>& a, const std::vector<Range>& b);
  absl::Status WaitForOther(const std::vector<Range>& ranges, int lane);
  absl::StatusOr<cudaEvent_t> NextEvent();

  const Plan& plan_;
  const cudaStream_t stream_[2];
  std::vector<cudaEvent_t> events_;
  size_t used_ = 0;
  // Of each lane: what the other has not waited for yet.
  std::vector<Issued> issued_[2];
};

}  // namespace hierad
