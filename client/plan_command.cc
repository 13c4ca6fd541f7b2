#include <cmath>
#include <cstdlib>

#include "base/plan/plan_report.h"
#include "base/text.h"
#include "client/commands.h"
#include "client/job_file.h"
#include "client/job_json.h"

namespace hierad {
namespace {

// "80GiB", "81920 MiB", "80" (GiB), "85.9GB" in GiB.
absl::StatusOr<double> ParseGib(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  std::string unit(end);
  unit.erase(0, unit.find_first_not_of(' '));
  static constexpr struct {
    const char* name;
    double gib;
  } kUnits[] = {{"", 1}, {"GiB", 1}, {"MiB", 1.0 / 1024}, {"TiB", 1024}, {"GB", 1e9 / (1 << 30)}, {"MB", 1e6 / (1 << 30)}};
  for (const auto& known : kUnits) {
    if (unit == known.name && end != text.c_str() && std::isfinite(number) && number > 0) return number * known.gib;
  }
  return absl::InvalidArgumentError(Printable(text, 40) + " is no amount of memory; give one such as 80GiB, 81920MiB or 80GB");
}

}  // namespace

int PlanJob(const PlanCommandOptions& options, const Context& context) {
  PlanReportOptions wanted{.card = options.card, .memory_gib = 0, .samples = options.samples};
  wanted.fit = !options.fit.empty();
  if (const std::string& amount = wanted.fit ? options.fit : options.memory; !amount.empty()) {
    const auto gib = ParseGib(amount);
    if (!gib.ok()) return Fail(gib.status(), context);
    wanted.memory_gib = *gib;
  }
  const JobFile file = ReadJobFile(options.file, options.set);
  if (!file.problems.empty()) return RefuseFile(file, context);
  const auto report = ReportPlan(file.spec, wanted);
  if (!report.ok()) return Fail(report.status(), context);
  *context.out << (context.json ? report->Json() : report->Table());
  return kExitOk;
}

}  // namespace hierad
