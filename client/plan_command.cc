#include "base/plan/plan_report.h"
#include "client/commands.h"
#include "client/job_file.h"
#include "client/job_json.h"

namespace hierad {

int PlanJob(const PlanCommandOptions& options, const Context& context) {
  const JobFile file = ReadJobFile(options.file, options.set);
  if (!file.problems.empty()) return RefuseFile(file, context);
  const bool fit = options.fit_bytes > 0;
  const double memory_gib = fit ? double(options.fit_bytes) / double(int64_t{1} << 30) : options.memory_gib;
  const auto report = ReportPlan(file.spec, {.card = options.card, .memory_gib = memory_gib, .fit = fit});
  if (!report.ok()) return Fail(report.status(), context);
  *context.out << (context.json ? report->Json() : report->Table());
  return kExitOk;
}

}  // namespace hierad
