#include "client/job_text.h"

#include <algorithm>

#include "base/text.h"
#include "client/job_json.h"
#include "client/render.h"

namespace hierad {
namespace {

std::string Name(const std::string& text) { return text.empty() ? "-" : PrintableSentence(text, 120); }

std::string Steps(const v1::Job& job) {
  if (job.total_steps() == 0) return job.step() == 0 ? "-" : std::to_string(job.step());
  return std::to_string(job.step()) + "/" + std::to_string(job.total_steps());
}

std::string Percent(const v1::Job& job) {
  if (job.total_steps() <= 0) return "-";
  return std::to_string(job.step() * 100 / job.total_steps()) + "%";
}

std::string Loss(const v1::Job& job) { return job.has_last() ? NumberText(job.last().loss()) : "-"; }

std::string Ago(int64_t unix_ms, const Context& context) {
  if (unix_ms <= 0) return "-";
  return DurationText(double(std::max<int64_t>(context.clock->UnixMs() - unix_ms, 0)) / 1000) + " ago";
}

}  // namespace

std::string DataText(const v1::JobSpec& spec) {
  const v1::DataSpec& data = spec.data();
  if (data.source() == "synthetic") return "synthetic (random numbers)";
  return data.source() + (data.path().empty() ? "" : " " + PrintableSentence(data.path(), 400));
}

std::string StateText(v1::JobState state, bool color) {
  const Color shade = state == v1::SUCCEEDED  ? Color::kGreen
                      : state == v1::FAILED   ? Color::kRed
                      : state == v1::RUNNING  ? Color::kCyan
                      : state == v1::CANCELLED || state == v1::STOPPING || state == v1::PAUSED ? Color::kYellow
                                                                                               : Color::kNone;
  return Painted(StateName(state), shade, color);
}

namespace {

struct Column {
  const char* name;
  bool right;
  bool usual;
  std::string (*cell)(const v1::Job&, const Context&);
};

const Column kColumns[] = {
    {"id", true, true, [](const v1::Job& job, const Context&) { return std::to_string(job.id()); }},
    {"name", false, true, [](const v1::Job& job, const Context&) { return Name(job.spec().name()); }},
    {"state", false, true, [](const v1::Job& job, const Context& context) { return StateText(job.state(), context.color); }},
    {"step", true, true, [](const v1::Job& job, const Context&) { return Steps(job); }},
    {"done", true, true, [](const v1::Job& job, const Context&) { return Percent(job); }},
    {"loss", true, true, [](const v1::Job& job, const Context&) { return Loss(job); }},
    {"samples/s", true, true, [](const v1::Job& job, const Context&) {
       return job.state() == v1::RUNNING && job.samples_per_s() > 0 ? CountText(job.samples_per_s()) : std::string("-");
     }},
    {"eta", true, true, [](const v1::Job& job, const Context&) {
       return job.state() == v1::RUNNING && job.eta_s() > 0 ? DurationText(job.eta_s()) : std::string("-");
     }},
    {"submitted", false, true, [](const v1::Job& job, const Context& context) { return Ago(job.submitted_ms(), context); }},
    {"started", false, false, [](const v1::Job& job, const Context& context) { return Ago(job.started_ms(), context); }},
    {"finished", false, false, [](const v1::Job& job, const Context& context) { return Ago(job.finished_ms(), context); }},
    {"eval", true, false, [](const v1::Job& job, const Context&) {
       return job.has_best_eval_loss() ? NumberText(job.best_eval_loss()) : std::string("-");
     }},
    {"rate", true, false, [](const v1::Job& job, const Context&) { return job.has_last() ? NumberText(job.last().lr()) : std::string("-"); }},
    {"attempt", true, false, [](const v1::Job& job, const Context&) { return std::to_string(job.attempt()); }},
    {"ranks", true, false, [](const v1::Job& job, const Context&) { return std::to_string(job.spec().resources().ranks()); }},
    {"data", false, false, [](const v1::Job& job, const Context&) { return DataText(job.spec()); }},
    {"submitter", false, false, [](const v1::Job& job, const Context&) { return Name(job.submitter()); }},
    {"reason", false, false, [](const v1::Job& job, const Context&) {
       return job.reason() == v1::REASON_UNSPECIFIED ? std::string("-") : ReasonName(job.reason());
     }},
    {"folder", false, false, [](const v1::Job& job, const Context&) { return Name(job.run_folder()); }},
    {"message", false, false, [](const v1::Job& job, const Context&) { return job.message().empty() ? std::string("-") : PrintableSentence(job.message()); }},
};

const Column* FindColumn(const std::string& name) {
  for (const Column& column : kColumns) {
    if (column.name == name) return &column;
  }
  return nullptr;
}

}  // namespace

std::string ColumnNames() {
  std::string names;
  for (const Column& column : kColumns) names += (names.empty() ? "" : ", ") + std::string(column.name);
  return names;
}

absl::StatusOr<std::vector<std::string>> ParseColumns(const std::string& columns) {
  std::vector<std::string> names;
  if (columns.empty()) {
    for (const Column& column : kColumns) {
      if (column.usual) names.push_back(column.name);
    }
    return names;
  }
  for (const std::string& name : Split(columns, ',')) {
    if (FindColumn(name) == nullptr) {
      return absl::InvalidArgumentError("--columns: there is no column \"" + Printable(name, 40) + "\"; there are " + ColumnNames());
    }
    names.push_back(name);
  }
  return names;
}

std::string JobTable(const std::vector<v1::Job>& jobs, const std::vector<std::string>& columns, const Context& context) {
  std::vector<std::string> heading;
  std::vector<size_t> right;
  for (const std::string& name : columns) {
    if (FindColumn(name)->right) right.push_back(heading.size());
    std::string upper = name;
    for (char& c : upper) c = c >= 'a' && c <= 'z' ? char(c - 32) : c;
    heading.push_back(upper);
  }
  Table table(heading);
  table.AlignRight(right);
  for (const v1::Job& job : jobs) {
    std::vector<std::string> row;
    for (const std::string& name : columns) row.push_back(FindColumn(name)->cell(job, context));
    table.Add(std::move(row));
  }
  return table.Text();
}

namespace {

void AddCheckpoints(const std::vector<v1::CheckpointInfo>& checkpoints, const std::function<void(const char*, const std::string&)>& line) {
  if (checkpoints.empty()) return;
  const v1::CheckpointInfo& newest = checkpoints.front();
  line("checkpoints", std::to_string(checkpoints.size()) + ", the newest at step " + std::to_string(newest.step()) +
                          " (" + BytesText(newest.bytes()) + ")");
  for (const v1::CheckpointInfo& c : checkpoints) {
    if (c.best()) line("best", "step " + std::to_string(c.step()) + (c.has_eval_loss() ? ", eval loss " + NumberText(c.eval_loss()) : ""));
    if (c.damaged()) line("damaged", "step " + std::to_string(c.step()) + ": " + Name(c.path()) + " failed verification and is not used");
  }
}

std::string RankTable(const v1::Job& job, const Context& context) {
  Table table({"RANK", "NODE", "SLOT", "PHASE", "STEP", "PID", "SEEN", "WAITS IN"});
  table.AlignRight({0, 4, 5});
  for (const v1::RankView& rank : job.ranks()) {
    table.Add({std::to_string(rank.rank()), Name(rank.node()), Name(rank.slot_id()), PhaseName(rank.phase()),
               std::to_string(rank.step()), rank.pid() > 0 ? std::to_string(rank.pid()) : "-",
               Ago(rank.last_seen_ms(), context),
               rank.silent_s() > 0 ? "silent for " + std::to_string(rank.silent_s()) + " s" : Name(rank.waiting_in())});
  }
  return table.Text();
}

// What reading the training set took, a line a rank.
std::string DataTable(const v1::Job& job) {
  Table table({"RANK", "READ", "SAMPLES", "WAITED", "READERS", "LEFT OUT", "SLOWEST", "WHICH"});
  table.AlignRight({0, 1, 2, 3, 4, 5, 6});
  bool any = false;
  for (const v1::RankView& rank : job.ranks()) {
    const v1::DataCounters& d = rank.data();
    if (d.samples() == 0) continue;
    any = true;
    table.Add({std::to_string(rank.rank()), BytesText(d.bytes()), CountText(double(d.samples())), DurationText(d.wait_s()), std::to_string(d.threads()),
               std::to_string(d.skipped_samples()), DurationText(d.slowest_s()), Name(d.slowest())});
  }
  return any ? "\nreading the training set, in this attempt:\n" + table.Text() : "";
}

std::string AttemptTable(const v1::Job& job) {
  Table table({"ATTEMPT", "STARTED", "TOOK", "STEP", "REASON", "MESSAGE"});
  table.AlignRight({0, 2, 3});
  for (const v1::AttemptView& a : job.attempts()) {
    table.Add({std::to_string(a.attempt()), LocalTime(a.started_ms()), DurationText(double(std::max<int64_t>(a.ended_ms() - a.started_ms(), 0)) / 1000),
               std::to_string(a.step()), ReasonName(a.reason()), PrintableSentence(a.message())});
  }
  return table.Text();
}

}  // namespace

std::string JobDetails(const v1::Job& job, const std::vector<v1::CheckpointInfo>& checkpoints, const Context& context) {
  std::string text;
  const std::function<void(const char*, const std::string&)> line = [&](const char* label, const std::string& value) {
    std::string head(label);
    head.resize(14, ' ');
    text += head + value + "\n";
  };
  const v1::JobSpec& spec = job.spec();
  line("job", std::to_string(job.id()));
  line("name", Name(spec.name()));
  line("state", StateText(job.state(), context.color));
  if (job.reason() != v1::REASON_UNSPECIFIED) line("reason", ReasonName(job.reason()));
  if (!job.message().empty()) line("message", PrintableSentence(job.message()));
  if (!job.note().empty()) line("note", Painted(PrintableSentence(job.note()), Color::kYellow, context.color));
  for (const std::string& alert : job.alerts()) line("alert", Painted(PrintableSentence(alert), Color::kYellow, context.color));
  if (job.desired() != v1::DESIRED_RUN && !IsEnd(job.state())) line("wanted", DesiredName(job.desired()));
  line("step", Steps(job) + (job.total_steps() > 0 ? " (" + Percent(job) + "), epoch " + NumberText(job.epoch()) : ""));
  if (job.has_last()) {
    line("loss", NumberText(job.last().loss()));
    line("grad norm", NumberText(job.last().grad_norm()));
    line("rate", NumberText(job.last().lr()));
  }
  if (job.has_best_eval_loss()) line("best eval", NumberText(job.best_eval_loss()));
  if (job.nan_steps() > 0) line("NaN steps", std::to_string(job.nan_steps()));
  if (job.state() == v1::RUNNING && job.samples_per_s() > 0) line("samples/s", CountText(job.samples_per_s()));
  if (job.state() == v1::RUNNING && job.eta_s() > 0) line("ETA", DurationText(job.eta_s()));
  line("attempt", std::to_string(job.attempt()) + " of " + std::to_string(spec.retry().max_attempts()));
  for (const v1::Restart& restart : job.restarts()) line("restarts", std::to_string(restart.count()) + " after " + ReasonName(restart.reason()));
  if (job.first_step() > 0 && job.attempt() > 1) line("resumed at", "step " + std::to_string(job.first_step()));
  line("submitted", LocalTime(job.submitted_ms()) + " by " + Name(job.submitter()));
  line("started", LocalTime(job.started_ms()));
  if (job.finished_ms() > 0) line("finished", LocalTime(job.finished_ms()));
  if (job.retry_at_ms() > 0 && job.state() == v1::QUEUED) line("tries again", LocalTime(job.retry_at_ms()));
  line("data", DataText(spec));
  line("log level", spec.output().log_level().empty() ? "info" : Name(spec.output().log_level()));
  line("run folder", Name(job.run_folder()));
  AddCheckpoints(checkpoints, line);
  if (job.ranks_size() > 0) text += "\n" + RankTable(job, context) + DataTable(job);
  if (job.attempts_size() > (IsEnd(job.state()) ? 1 : 0)) text += "\n" + AttemptTable(job);
  return text;
}

std::string CheckpointTable(const std::vector<v1::CheckpointInfo>& checkpoints) {
  Table table({"STEP", "SIZE", "WRITTEN", "EVAL LOSS", "NOTE", "FOLDER"});
  table.AlignRight({0, 1, 3});
  for (const v1::CheckpointInfo& c : checkpoints) {
    table.Add({std::to_string(c.step()), BytesText(c.bytes()), LocalTime(c.created_ms()),
               c.has_eval_loss() ? NumberText(c.eval_loss()) : "-", c.damaged() ? "damaged" : c.best() ? "best" : "",
               PrintableSentence(c.path())});
  }
  return table.Text();
}

std::string NodeTable(const std::vector<v1::Node>& nodes, const Context& context) {
  Table table({"NODE", "STATE", "SLOT", "KIND", "MODEL", "MEMORY", "USED BY"});
  table.AlignRight({5});
  for (const v1::Node& node : nodes) {
    const std::string state = node.connected() ? node.drained() ? Painted("drained", Color::kYellow, context.color)
                                                                : Painted("connected", Color::kGreen, context.color)
                                               : Painted("lost " + Ago(node.last_seen_ms(), context), Color::kRed, context.color);
    if (node.slots().empty()) table.Add({Name(node.name()), state, "-", "-", "-", "-", "no slots"});
    for (const v1::SlotUse& use : node.slots()) {
      std::string used = use.job_id() == 0 ? "free" : "job " + std::to_string(use.job_id()) + " rank " + std::to_string(use.rank());
      if (!use.fault().empty()) used = (use.job_id() == 0 ? "" : used + ", then ") + "out of use: " + PrintableSentence(use.fault());
      table.Add({Name(node.name()), state, Name(use.slot().id()), SlotKindName(use.slot().kind()),
                 Name(use.slot().model()), use.slot().memory_bytes() > 0 ? BytesText(use.slot().memory_bytes()) : "-",
                 used});
    }
  }
  return table.Text();
}

std::string EndSentence(const v1::Job& job, bool color) {
  std::string text = "job " + std::to_string(job.id()) + " (" + Name(job.spec().name()) + "): " +
                     StateText(job.state(), color);
  if (job.total_steps() > 0) {
    text += (IsEnd(job.state()) ? " after " : " at ") + std::to_string(job.step()) + " of " +
            std::to_string(job.total_steps()) + " steps";
  }
  if (job.state() == v1::SUCCEEDED && job.has_last()) text += ", loss " + NumberText(job.last().loss());
  if (job.state() == v1::SUCCEEDED && job.spec().data().source() == "synthetic") text += ", data " + DataText(job.spec());
  if (job.state() == v1::FAILED) text += ", " + ReasonName(job.reason());
  if (job.state() != v1::SUCCEEDED && !job.message().empty()) text += ": " + PrintableSentence(job.message());
  return text;
}

ExitCode ExitCodeOf(const v1::Job& job) {
  switch (job.state()) {
    case v1::SUCCEEDED: return kExitOk;
    case v1::FAILED: return kExitFailed;
    case v1::CANCELLED: return kExitCancelled;
    default: return kExitNotFinished;
  }
}

}  // namespace hierad
