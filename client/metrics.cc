// hierctl metrics: every step of a job as a table, CSV, JSON, or a curve.
#include <algorithm>
#include <cmath>

#include "base/fs.h"
#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"
#include "client/plot.h"
#include "client/render.h"

namespace hierad {
namespace {

constexpr std::chrono::seconds kPatience{120};
constexpr int kPlotRows = 16;

std::vector<std::string> Columns() {
  std::vector<std::string> names;
  const Json none = JsonOf(v1::StepMetrics());
  for (const auto& [name, value] : none.items()) names.push_back(name);
  return names;
}

absl::StatusOr<std::vector<v1::StepMetrics>> Fetch(uint64_t job_id, const MetricsOptions& options, Connection& connection, const Context& context) {
  grpc::ClientContext call;
  Connection::SetDeadline(&call, kPatience);
  v1::MetricsRequest request;
  request.set_job_id(job_id);
  request.set_from_step(options.from);
  request.set_to_step(options.to);
  request.set_every(options.every);
  const auto reader = connection.stub().Metrics(&call, request);
  std::vector<v1::StepMetrics> steps;
  v1::MetricsReply reply;
  int64_t thinned_before = 0;
  while (reader->Read(&reply)) {
    steps.insert(steps.end(), reply.metrics().begin(), reply.metrics().end());
    thinned_before = reply.thinned_before();
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return connection.ErrorFrom(status);
  if (thinned_before > 0 && options.every <= 1 && options.from < thinned_before) {
    *context.err << "hierctl: steps before " << thinned_before << " are kept in part; metrics.jsonl in the run folder has all\n";
  }
  return steps;
}

// A cell of the CSV: as in metrics.jsonl, without quotes.
std::string Cell(const Json& value) {
  if (value.is_null()) return "";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void WriteCsv(const std::vector<v1::StepMetrics>& steps, const Context& context) {
  std::string line;
  for (const std::string& name : Columns()) line += (line.empty() ? "" : ",") + name;
  *context.out << line << "\n";
  for (const v1::StepMetrics& m : steps) {
    line.clear();
    bool first = true;
    const Json json = JsonOf(m);
    for (const auto& [name, value] : json.items()) {
      line += (first ? "" : ",") + Cell(value);
      first = false;
    }
    *context.out << line << "\n";
  }
}

void WriteTable(const std::vector<v1::StepMetrics>& steps, const Context& context) {
  Table table({"STEP", "EPOCH", "LOSS", "GRAD NORM", "RATE", "STEP S", "WAIT S", "EVAL LOSS", "NOTE"});
  table.AlignRight({0, 1, 2, 3, 4, 5, 6, 7});
  for (const v1::StepMetrics& m : steps) {
    table.Add({std::to_string(m.step()), NumberText(m.epoch()), NumberText(m.loss()), NumberText(m.grad_norm()), NumberText(m.lr()),
               NumberText(m.step_s()), NumberText(m.data_wait_s()), m.has_eval_loss() ? NumberText(m.eval_loss()) : "",
               m.skipped() ? "skipped" : ""});
  }
  *context.out << table.Text();
}

bool EndsIn(const std::string& name, const std::string& end) { return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0; }

double Value(const Json& json) {
  if (json.is_number()) return json.get<double>();
  if (json.is_boolean()) return json.get<bool>() ? 1 : 0;
  return NAN;   // what is not finite, or not there
}

int Draw(uint64_t job_id, const std::vector<v1::StepMetrics>& steps, const MetricsOptions& options, const Context& context) {
  Plot plot;
  plot.title = "job " + std::to_string(job_id) + ": " + options.column;
  for (const v1::StepMetrics& m : steps) {
    const Json json = JsonOf(m);
    if (!json[options.column].is_null()) plot.points.push_back({m.step(), Value(json[options.column])});
  }
  if (options.file.empty()) {
    *context.out << PlotText(plot, context.columns(), kPlotRows, context.unicode);
    return kExitOk;
  }
  const std::string drawing = EndsIn(options.file, ".png") ? PlotPng(plot) : PlotSvg(plot);
  if (drawing.empty()) return Fail(absl::ResourceExhaustedError("there is not enough memory to draw a PNG; .svg takes less"), context);
  if (const absl::Status written = WriteFileAtomic(options.file, drawing); !written.ok()) return Fail(written, context);
  *context.out << "wrote " << Printable(options.file) << "\n";
  return kExitOk;
}

}  // namespace

int Metrics(uint64_t job_id, const MetricsOptions& options, const Context& context) {
  const std::vector<std::string> columns = Columns();
  if (std::find(columns.begin(), columns.end(), options.column) == columns.end()) {
    std::string known;
    for (const std::string& name : columns) known += (known.empty() ? "" : ", ") + name;
    return Fail(absl::InvalidArgumentError("--column " + Printable(options.column) + " is none of " + known), context);
  }
  if (!options.file.empty() && !EndsIn(options.file, ".svg") && !EndsIn(options.file, ".png")) {
    return Fail(absl::InvalidArgumentError("--file " + Printable(options.file) + ": curves are written as SVG or PNG; give a name that ends in .svg or .png"), context);
  }
  if (options.to > 0 && options.to < options.from) {
    return Fail(absl::InvalidArgumentError("--to " + std::to_string(options.to) + " lies before --from " + std::to_string(options.from)), context);
  }
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  const auto steps = Fetch(job_id, options, **connection, context);
  if (!steps.ok()) return Fail(steps.status(), context);
  if (options.plot || !options.file.empty()) return Draw(job_id, *steps, options, context);
  if (context.csv) {
    WriteCsv(*steps, context);
  } else if (context.json) {
    Json list = Json::array();
    for (const v1::StepMetrics& m : *steps) list.push_back(JsonOf(m));
    *context.out << JsonText({{"metrics", std::move(list)}});
  } else if (steps->empty()) {
    *context.out << "job " << job_id << " has no steps yet\n";
  } else {
    WriteTable(*steps, context);
  }
  return kExitOk;
}

}  // namespace hierad
