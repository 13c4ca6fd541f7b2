#include "client/watch_view.h"

#include <algorithm>
#include <map>

#include "base/text.h"
#include "client/job_json.h"
#include "client/job_text.h"
#include "client/render.h"

namespace hierad {
namespace {

constexpr size_t kLosses = 4096;          // far more than a terminal has columns
constexpr int kRanksShown = 8;
constexpr int kBarColumns = 30;
constexpr std::chrono::seconds kPlainEvery{2};
constexpr std::chrono::seconds kSignAfter{10};        // without a change: a line all the same,
constexpr std::chrono::seconds kSignAtLeast{300};     // then after twice the time, but so often

}  // namespace

void WatchView::Update(const v1::WatchReply& reply) {
  job_ = reply.job();
  for (const v1::StepMetrics& m : reply.metrics()) {
    if (m.step() <= last_step_) continue;   // sent again after a reconnect
    last_step_ = m.step();
    if (metrics_seen_++ % losses_stride_ == 0) losses_.push_back(m.loss());
    if (losses_.size() > kLosses) {
      size_t kept = 0;
      for (size_t i = 0; i < losses_.size(); i += 2) losses_[kept++] = losses_[i];
      losses_.resize(kept);
      losses_stride_ *= 2;
    }
    if (every_steps_ > 0 && m.step() % every_steps_ == 0) due_.push_back(m);
  }
}

std::string WatchView::RankLines() const {
  std::string text;
  int64_t furthest = 0;
  for (const v1::RankView& rank : job_.ranks()) furthest = std::max(furthest, rank.step());
  if (job_.ranks_size() <= kRanksShown) {
    for (const v1::RankView& rank : job_.ranks()) {
      text += "rank " + std::to_string(rank.rank()) + "  " + PhaseName(rank.phase()) + "  step " +
              std::to_string(rank.step()) + "  " + PrintableSentence(rank.slot_id(), 40) + " on " +
              PrintableSentence(rank.node(), 40);
      if (rank.step() < furthest) text += "  " + std::to_string(furthest - rank.step()) + " behind";
      if (rank.silent_s() > 0) text += "  " + Painted("silent for " + std::to_string(rank.silent_s()) + " s", Color::kRed, context_.color);
      else if (!rank.waiting_in().empty()) text += "  waits in " + PrintableSentence(rank.waiting_in(), 80);
      text += "\n";
    }
    return text;
  }
  std::map<std::string, int> phases;
  const v1::RankView* slowest = &job_.ranks(0);
  for (const v1::RankView& rank : job_.ranks()) {
    ++phases[PhaseName(rank.phase())];
    if (rank.step() < slowest->step()) slowest = &rank;
  }
  text = std::to_string(job_.ranks_size()) + " ranks:";
  for (const auto& [phase, count] : phases) text += " " + std::to_string(count) + " " + phase;
  return text + "; rank " + std::to_string(slowest->rank()) + " is at step " + std::to_string(slowest->step()) +
         ", the lowest\n";
}

std::string WatchView::Block() const {
  const v1::Job& job = job_;
  std::string text = Painted("job " + std::to_string(job.id()) + "  " + PrintableSentence(job.spec().name(), 80), Color::kBold, context_.color) +
                     "  " + StateText(job.state(), context_.color);
  if (job.attempt() > 1) text += "  attempt " + std::to_string(job.attempt());
  if (job.started_ms() > 0) {
    const int64_t until = job.finished_ms() > 0 ? job.finished_ms() : context_.clock->UnixMs();
    text += "  " + DurationText(double(std::max<int64_t>(until - job.started_ms(), 0)) / 1000);
  }
  text += "\n";
  if (job.total_steps() > 0) {
    const double done = double(job.step()) / double(job.total_steps());
    char percent[16];
    std::snprintf(percent, sizeof percent, "%.1f%%", 100 * done);
    text += Bar(done, kBarColumns, context_.unicode) + "  " + percent + "  step " + std::to_string(job.step()) + " of " +
            std::to_string(job.total_steps()) + "  epoch " + NumberText(job.epoch()) + "\n";
  }
  if (job.has_last()) {
    text += "loss " + NumberText(job.last().loss()) + "  " + Sparkline(losses_, kBarColumns, context_.unicode) + "\n";
    if (job.last().has_eval_loss()) text += "eval loss " + NumberText(job.last().eval_loss()) + "\n";
    text += "rate " + NumberText(job.last().lr()) + "  gradient norm " + NumberText(job.last().grad_norm());
    if (job.nan_steps() > 0) text += "  " + Painted(std::to_string(job.nan_steps()) + " NaN steps skipped", Color::kRed, context_.color);
    text += "\n";
  }
  if (!IsEnd(job.state()) && job.samples_per_s() > 0) {
    text += CountText(job.samples_per_s()) + " samples/s" + (job.eta_s() > 0 ? "  ETA " + DurationText(job.eta_s()) : "") + "\n";
  }
  if (job.spec().data().source() == "synthetic") {
    text += "data: " + DataText(job.spec()) + "\n";
  }
  if (!IsEnd(job.state())) text += RankLines();
  if (!job.message().empty()) text += PrintableSentence(job.message()) + "\n";
  if (!job.note().empty()) text += Painted(PrintableSentence(job.note()), Color::kYellow, context_.color) + "\n";
  std::string cut;
  for (const std::string& line : Split(std::string_view(text).substr(0, text.size() - 1), '\n')) {
    cut += Cut(line, size_t(std::max(context_.columns() - 1, 20))) + "\n";
  }
  return cut;
}

std::string WatchView::PlainLine(int64_t step, double loss, double lr) const {
  std::string text = LocalTime(context_.clock->UnixMs()) + "  job " + std::to_string(job_.id()) + "  " + StateName(job_.state());
  if (job_.total_steps() > 0) {
    char percent[16];
    std::snprintf(percent, sizeof percent, "%.1f%%", 100.0 * double(step) / double(job_.total_steps()));
    text += "  step " + std::to_string(step) + "/" + std::to_string(job_.total_steps()) + " (" + percent + ")";
  }
  if (job_.has_last()) text += "  loss " + NumberText(loss) + "  rate " + NumberText(lr);
  if (job_.state() == v1::RUNNING && job_.samples_per_s() > 0) text += "  " + CountText(job_.samples_per_s()) + " samples/s";
  if (job_.state() == v1::RUNNING && job_.eta_s() > 0) text += "  ETA " + DurationText(job_.eta_s());
  return text;
}

std::string WatchView::PlainLines() {
  std::string text;
  const std::string state = StateName(job_.state()) + std::to_string(job_.attempt());
  const bool changed = state != printed_state_;
  for (const v1::StepMetrics& m : due_) text += PlainLine(m.step(), m.loss(), m.lr()) + "\n";
  due_.clear();
  const auto now = context_.clock->Monotonic();
  if (changed || job_.step() != moved_step_) {
    moved_step_ = job_.step();
    moved_at_ = now;
  }
  const bool time = every_steps_ == 0 && now - printed_at_ >= kPlainEvery && job_.step() != printed_step_;
  const bool sign = every_steps_ == 0 && !time && now - printed_at_ >= std::clamp<std::chrono::nanoseconds>(printed_at_ - moved_at_, kSignAfter, kSignAtLeast);
  if (changed || time || sign) {
    text += PlainLine(job_.step(), job_.last().loss(), job_.last().lr());
    if (sign && !changed) text += "  unchanged for " + DurationText(std::chrono::duration<double>(now - moved_at_).count());
    if ((changed || sign) && !job_.message().empty()) text += "  " + PrintableSentence(job_.message());
    text += "\n";
    printed_state_ = state;
    printed_step_ = job_.step();
    printed_at_ = now;
  }
  return text;
}

std::string WatchView::Rewind(int lines) {
  return lines > 0 ? "\x1b[" + std::to_string(lines) + "F\x1b[J" : "";
}

}  // namespace hierad
