#include "worker/step/lanes.h"

#include <algorithm>
#include <iterator>
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

absl::Status Lanes::WaitForOthers(const std::vector<Range>& ranges, int lane) {
  for (int other = 0; other < kNumLanes; ++other) {
    if (stream_[other] == stream_[lane]) continue;
    for (size_t i = issued_[other].size(); i-- > waited_[lane][other];) {
      if (!Meet(ranges, issued_[other][i].ranges)) continue;
      RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(stream_[lane], issued_[other][i].done, 0), "ordering the step's streams"));
      waited_[lane][other] = i + 1;   // a stream's order makes the earlier ones done too
      break;
    }
  }
  return absl::OkStatus();
}

absl::Status Lanes::Join(int from, int to) {
  if (stream_[from] == stream_[to]) return absl::OkStatus();
  ASSIGN_OR_RETURN(cudaEvent_t event, NextEvent());
  RETURN_IF_ERROR(CudaStatus(cudaEventRecord(event, stream_[from]), "ordering the step's streams"));
  return CudaStatus(cudaStreamWaitEvent(stream_[to], event, 0), "ordering the step's streams");
}

int Lanes::LaneOf(const Op& op) const {
  const int lane = AnnouncedBy(op.args) != nullptr ? kReductions : op.beside ? kBeside : kChain;
  return stream_[lane] == stream_[kChain] ? kChain : lane;
}

absl::Status Lanes::Run(absl::Span<const Op> ops, const std::function<bool(const Op&)>& take,
                        const std::function<absl::Status(const Op&, cudaStream_t, int)>& launch) {
  used_ = 0;
  for (int lane = 0; lane < kNumLanes; ++lane) {
    issued_[lane].clear();
    std::fill(std::begin(waited_[lane]), std::end(waited_[lane]), 0);
  }
  // Where the other streams join, in a recording above all: only those that get an operation, or they would not come back.
  bool uses[kNumLanes] = {};
  for (const Op& op : ops) uses[LaneOf(op)] |= take(op);
  for (int lane = kChain + 1; lane < kNumLanes; ++lane) {
    if (uses[lane]) RETURN_IF_ERROR(Join(kChain, lane));
  }
  for (const Op& op : ops) {
    if (!take(op)) continue;
    const int lane = LaneOf(op);
    std::vector<Range> ranges = RangesOf(op);
    RETURN_IF_ERROR(WaitForOthers(ranges, lane));
    RETURN_IF_ERROR(launch(op, stream_[lane], lane));
    ASSIGN_OR_RETURN(cudaEvent_t done, NextEvent());
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(done, stream_[lane]), "ordering the step's streams"));
    issued_[lane].push_back({done, std::move(ranges)});
  }
  for (int lane = kChain + 1; lane < kNumLanes; ++lane) {
    if (uses[lane]) RETURN_IF_ERROR(Join(lane, kChain));
  }
  return absl::OkStatus();
}

}  // namespace hierad
