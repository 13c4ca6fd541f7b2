#include "worker/step/lanes.h"

#include <utility>

#include "base/status.h"
#include "worker/step/fused_op_gpu.h"

namespace hierad {

Lanes::~Lanes() {
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
}

absl::StatusOr<cudaEvent_t> Lanes::NextEvent() {
  if (used_ == events_.size()) {
    cudaEvent_t event = nullptr;
    RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
    events_.push_back(event);
  }
  return events_[used_++];
}

std::vector<Lanes::Range> Lanes::RangesOf(const Op& op) const {
  std::vector<Range> ranges;
  auto add = [&](const std::vector<TensorId>& ids, bool written) {
    for (TensorId id : ids) {
      const TensorSpec& t = plan_.tensors[id];
      ranges.push_back({t.arena, t.offset, t.offset + t.bytes, written});
    }
  };
  add(op.reads, false);
  add(op.writes, true);
  return ranges;
}

bool Lanes::Meet(const std::vector<Range>& a, const std::vector<Range>& b) {
  for (const Range& x : a) {
    for (const Range& y : b) {
      if ((x.written || y.written) && x.arena == y.arena && x.begin < y.end && y.begin < x.end) return true;
    }
  }
  return false;
}

absl::Status Lanes::WaitForOther(const std::vector<Range>& ranges, int lane) {
  std::vector<Issued>& others = issued_[1 - lane];
  for (size_t i = others.size(); i-- > 0;) {
    if (!Meet(ranges, others[i].ranges)) continue;
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(stream_[lane], others[i].done, 0), "ordering the step's streams"));
    others.erase(others.begin(), others.begin() + long(i) + 1);   // a stream's order makes the earlier ones done too
    break;
  }
  return absl::OkStatus();
}

absl::Status Lanes::Run(const std::vector<Op>& ops, size_t count, const std::function<absl::Status(const Op&, cudaStream_t, int)>& launch) {
  const bool two = stream_[kChain] != stream_[kBeside];
  used_ = 0;
  issued_[0].clear(), issued_[1].clear();
  if (two) {
    // Where the other stream joins, in a recording above all.
    ASSIGN_OR_RETURN(cudaEvent_t start, NextEvent());
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(start, stream_[kChain]), "ordering the step's streams"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(stream_[kBeside], start, 0), "ordering the step's streams"));
  }
  for (size_t i = 0; i < count; ++i) {
    const int lane = two && ops[i].beside ? kBeside : kChain;
    if (!two) {
      RETURN_IF_ERROR(launch(ops[i], stream_[lane], lane));
      continue;
    }
    std::vector<Range> ranges = RangesOf(ops[i]);
    RETURN_IF_ERROR(WaitForOther(ranges, lane));
    RETURN_IF_ERROR(launch(ops[i], stream_[lane], lane));
    ASSIGN_OR_RETURN(cudaEvent_t done, NextEvent());
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(done, stream_[lane]), "ordering the step's streams"));
    issued_[lane].push_back({done, std::move(ranges)});
  }
  if (two) {
    ASSIGN_OR_RETURN(cudaEvent_t end, NextEvent());
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end, stream_[kBeside]), "ordering the step's streams"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(stream_[kChain], end, 0), "ordering the step's streams"));
  }
  return absl::OkStatus();
}

}  // namespace hierad
