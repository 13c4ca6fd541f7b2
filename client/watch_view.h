// What a watched job looks like over time: a block that is redrawn on a terminal, or a line now and then. Fed with the
// replies of Watch; holds the losses seen. One thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/context.h"
#include "hierad/v1/control.pb.h"

namespace hierad {

class WatchView {
 public:
  // `every_steps` 0: a plain line at each change of state and about every two seconds, and where nothing changes one
  // after 10 s, 20 s, 40 s... that says so; else at each such step.
  WatchView(const Context& context, int64_t every_steps) : context_(context), every_steps_(every_steps) {}

  void Update(const v1::WatchReply& reply);

  // The block, lines with '\n', none longer than the terminal is wide.
  std::string Block() const;
  // Lines due since the last call, maybe none.
  std::string PlainLines();
  // Escape sequences that put the cursor at the top of a block of `lines` lines and clear it.
  static std::string Rewind(int lines);

  const v1::Job& job() const { return job_; }
  int64_t last_step() const { return last_step_; }   // newest metric seen

 private:
  std::string PlainLine(int64_t step, double loss, double lr) const;
  std::string RankLines() const;

  const Context& context_;
  const int64_t every_steps_;
  v1::Job job_;
  std::vector<double> losses_;             // at most kLosses: thinned to every second one when full
  int64_t losses_stride_ = 1;
  int64_t metrics_seen_ = 0;
  int64_t last_step_ = 0;
  std::vector<v1::StepMetrics> due_;       // of every_steps, not yet printed
  std::string printed_state_;
  int64_t printed_step_ = -1, moved_step_ = -1;
  std::chrono::nanoseconds printed_at_{0}, moved_at_{0};   // of the last line; since when neither state nor step has changed
};

}  // namespace hierad
