#include "client/top_view.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/text.h"
#include "client/job_json.h"
#include "client/job_text.h"
#include "client/render.h"

namespace hierad {
namespace {

constexpr size_t kLosses = 512;
constexpr double kNotedWait = 0.01;   // share of the step that is worth a line
constexpr int kCurveColumns = 12, kDoneColumns = 8, kBudgetColumns = 24;

struct Share {
  char letter;
  const char* word;
  Color color;
  double ratio;
};

std::vector<Share> SharesOf(const v1::RankTotals& t) {
  if (t.step_count() == 0 || !(t.step_s() > 0)) return {};
  const double told = t.data_wait_s() + t.forward_s() + t.backward_s() + t.communication_s() + t.optimizer_s();
  const double whole = std::max(told, t.step_s());
  return {{'w', "wait", Color::kRed, t.data_wait_s() / whole},      {'f', "fwd", Color::kGreen, t.forward_s() / whole},
          {'b', "bwd", Color::kCyan, t.backward_s() / whole},       {'c', "comm", Color::kYellow, t.communication_s() / whole},
          {'o', "opt", Color::kBold, t.optimizer_s() / whole},      {'.', "other", Color::kDim, (whole - told) / whole}};
}

std::string Padded(const std::string& text, size_t columns, bool right = false) {
  const std::string cut = Cut(text, columns), space(columns - std::min(columns, Columns(cut)), ' ');
  return right ? space + cut : cut + space;
}

// A line of the list: 5 + 14 + 9 + 13 + 7 + 12 + 6 + 6 columns and the spaces between them, 79 in all.
std::string Row(const std::array<std::string, 8>& cells) {
  return Padded(cells[0], 5, true) + " " + Padded(cells[1], 14) + " " + Padded(cells[2], 9) + " " + Padded(cells[3], kDoneColumns + 5) + " " +
         Padded(cells[4], 7, true) + " " + Padded(cells[5], kCurveColumns) + " " + Padded(cells[6], 6, true) + " " + Padded(cells[7], 6, true);
}

// At most six columns: "42 s", "59 min", "23h59m", "99d23h".
std::string ShortDuration(double seconds) {
  const auto s = int64_t(std::min(std::ceil(seconds), 99.0 * 86400));
  char text[32];
  if (s < 60) std::snprintf(text, sizeof text, "%d s", int(s));
  else if (s < 3600) std::snprintf(text, sizeof text, "%d min", int(s / 60));
  else if (s < 86400) std::snprintf(text, sizeof text, "%dh%02dm", int(s / 3600), int(s % 3600 / 60));
  else std::snprintf(text, sizeof text, "%dd%dh", int(s / 86400), int(s % 86400 / 3600));
  return text;
}

int Order(v1::JobState state) {
  switch (state) {
    case v1::RUNNING:
    case v1::STARTING:
    case v1::STOPPING: return 0;
    case v1::QUEUED: return 1;
    case v1::PAUSED: return 2;
    default: return 3;
  }
}

}  // namespace

std::string BudgetBar(const v1::RankTotals& totals, int columns, bool color) {
  std::string bar;
  double sum = 0;
  int filled = 0;
  for (const Share& share : SharesOf(totals)) {
    sum += share.ratio;
    const int until = std::min(columns, int(std::lround(sum * columns)));
    if (until > filled) bar += Painted(std::string(size_t(until - filled), share.letter), share.color, color);
    filled = std::max(filled, until);
  }
  return bar;
}

void TopView::SetJobs(const v1::ListReply& jobs) {
  jobs_ = jobs;
  std::erase_if(curves_, [&](const auto& curve) {
    return std::none_of(jobs_.jobs().begin(), jobs_.jobs().end(), [&](const v1::Job& job) { return job.id() == curve.first; });
  });
}

void TopView::AddSteps(uint64_t job_id, const std::vector<v1::StepMetrics>& steps) {
  Curve& curve = curves_[job_id];
  for (const v1::StepMetrics& m : steps) {
    if (m.step() <= curve.last_step) continue;
    curve.last_step = m.step();
    if (curve.seen++ % curve.stride == 0) curve.losses.push_back(m.loss());
    if (curve.losses.size() > kLosses) {
      size_t kept = 0;
      for (size_t i = 0; i < curve.losses.size(); i += 2) curve.losses[kept++] = curve.losses[i];
      curve.losses.resize(kept);
      curve.stride *= 2;
    }
  }
}

int64_t TopView::NextStep(uint64_t job_id) const {
  const auto found = curves_.find(job_id);
  return found == curves_.end() ? 0 : found->second.last_step + 1;
}

std::vector<v1::Job> TopView::Shown(size_t most) const {
  std::vector<v1::Job> shown(jobs_.jobs().begin(), jobs_.jobs().end());
  std::stable_sort(shown.begin(), shown.end(), [](const v1::Job& a, const v1::Job& b) {
    const int first = Order(a.state()), second = Order(b.state());
    return first != second ? first < second : first <= 1 ? a.id() < b.id() : a.id() > b.id();
  });
  if (shown.size() > most) shown.resize(most);
  return shown;
}

std::string TopView::Head() const {
  std::map<std::string, int> states;
  int alerts = 0;
  for (const v1::Job& job : jobs_.jobs()) {
    if (!IsEnd(job.state())) ++states[StateName(job.state())];
    alerts += job.alerts_size();
  }
  int slots = 0, busy = 0, gpus = 0, lost = 0;
  for (const v1::Node& node : nodes_.nodes()) {
    for (const v1::SlotUse& use : node.slots()) {
      ++slots;
      busy += use.job_id() != 0;
      gpus += use.slot().kind() == v1::Slot::CUDA;
      lost += !node.connected();
    }
  }
  std::string head = "hierad  " + LocalTime(context_.clock->UnixMs()).substr(11);
  for (const auto& [state, count] : states) head += "  " + std::to_string(count) + " " + state;
  head += "  " + std::to_string(busy) + " of " + std::to_string(slots) + (gpus == slots && gpus > 0 ? " GPUs" : " slots") + " busy";
  if (lost > 0) head += "  " + Painted(std::to_string(lost) + " lost", Color::kRed, context_.color);
  if (alerts > 0) head += "  " + Painted(std::to_string(alerts) + (alerts == 1 ? " alert" : " alerts"), Color::kYellow, context_.color);
  return head;
}

std::string TopView::JobLine(const v1::Job& job) const {
  const double done = job.total_steps() > 0 ? double(job.step()) / double(job.total_steps()) : 0;
  char percent[16] = "-";
  if (job.total_steps() > 0) std::snprintf(percent, sizeof percent, "%.0f%%", 100 * done);
  const auto curve = curves_.find(job.id());
  const std::string line = curve == curves_.end() ? "" : Sparkline(curve->second.losses, kCurveColumns, context_.unicode);
  const bool running = job.state() == v1::RUNNING;
  return Row({std::to_string(job.id()), PrintableSentence(job.spec().name(), 120), StateText(job.state(), context_.color),
              Bar(done, kDoneColumns, context_.unicode) + " " + Padded(percent, 4, true), job.has_last() ? NumberText(job.last().loss()) : "-", line,
              running && job.samples_per_s() > 0 ? CountText(job.samples_per_s()) : "-", running && job.eta_s() > 0 ? ShortDuration(job.eta_s()) : "-"});
}

std::string TopView::BudgetLine(const v1::Job& job) const {
  if (job.ranks_size() == 0 || IsEnd(job.state())) return "";
  const v1::RankTotals& totals = job.ranks(0).totals();
  const std::string bar = BudgetBar(totals, kBudgetColumns, context_.color);
  if (bar.empty()) return "";
  std::string line = "      step " + DurationText(totals.step_s() / double(totals.step_count())) + " " + bar;
  for (const Share& share : SharesOf(totals)) {
    char part[32];
    std::snprintf(part, sizeof part, " %s %.0f%%", share.word, 100 * share.ratio);
    if (share.ratio >= 0.005) line += part;
  }
  return line;
}

// What reading took, where it costs time or samples: of the rank that waited longest.
std::string TopView::InputLine(const v1::Job& job) const {
  if (IsEnd(job.state()) || job.ranks_size() == 0) return "";
  const v1::RankView* worst = &job.ranks(0);
  int64_t left_out = 0;
  for (const v1::RankView& rank : job.ranks()) {
    if (rank.data().wait_s() > worst->data().wait_s()) worst = &rank;
    left_out += rank.data().skipped_samples();
  }
  const v1::DataCounters& d = worst->data();
  if (d.samples() == 0 || (left_out == 0 && d.wait_s() < kNotedWait * worst->totals().step_s())) return "";
  std::string line = "      input";
  if (left_out > 0) line += " " + Painted(CountText(double(left_out)) + " samples left out", Color::kYellow, context_.color) + ",";
  line += " rank " + std::to_string(worst->rank()) + " waited " + DurationText(d.wait_s()) + ", " + std::to_string(d.threads()) + (d.threads() == 1 ? " reader" : " readers") +
          ", slowest " + DurationText(d.slowest_s()) + ": ";
  // The end of a path tells more than its beginning.
  const std::string which = PrintableSentence(d.slowest(), 400);
  const size_t slash = which.rfind('/');
  return line + (slash == std::string::npos ? which : which.substr(slash + 1));
}

std::string TopView::Block(int rows) const {
  std::vector<std::string> lines = {Head(), "", Row({"ID", "NAME", "STATE", "DONE", "LOSS", "CURVE", "SMPL/S", "LEFT"})};
  size_t left_out = 0;
  const std::vector<v1::Job> shown = Shown(size_t(jobs_.jobs_size()));
  for (size_t i = 0; i < shown.size(); ++i) {
    std::vector<std::string> more = {JobLine(shown[i])};
    if (const std::string budget = BudgetLine(shown[i]); !budget.empty()) more.push_back(budget);
    if (!IsEnd(shown[i].state()) && shown[i].spec().data().source() == "synthetic") more.push_back("      data: " + DataText(shown[i].spec()));
    if (const std::string input = InputLine(shown[i]); !input.empty()) more.push_back(input);
    if (shown[i].state() == v1::QUEUED && !shown[i].message().empty()) more.push_back("      " + PrintableSentence(shown[i].message(), 400));
    for (const std::string& alert : shown[i].alerts()) {
      more.push_back(Painted("      ! " + PrintableSentence(alert, 400), Color::kYellow, context_.color));
    }
    if (int(lines.size() + more.size()) + 1 > rows) {
      left_out = shown.size() - i;
      break;
    }
    lines.insert(lines.end(), more.begin(), more.end());
  }
  if (shown.empty()) lines.push_back("no jobs");
  if (left_out > 0) lines.push_back("      and " + std::to_string(left_out) + " more; hierctl list shows them");
  std::string text;
  const size_t wide = size_t(std::max(20, context_.columns() - 1));
  for (const std::string& line : lines) text += Cut(line, wide) + "\n";
  return text;
}

}  // namespace hierad
