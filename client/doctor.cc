#include <cstdlib>

#include "base/text.h"
#include "client/commands.h"
#include "client/doctor_checks.h"
#include "client/doctor_figures.h"
#include "client/job_file.h"
#include "client/job_json.h"
#include "client/render.h"

namespace hierad {
namespace {

// Where hierad keeps its runs when a person starts it.
std::string StateFolder() {
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && *state == '/') return std::string(state) + "/hierad";
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') return std::string(home) + "/.local/state/hierad";
  return "/var/lib/hierad";
}

std::string CheckLines(const std::vector<DoctorCheck>& checks, const Context& context) {
  std::string text;
  size_t width = 0;
  for (const DoctorCheck& check : checks) width = std::max(width, check.name.size());
  for (const DoctorCheck& check : checks) {
    const Color color = check.verdict == Verdict::kPass ? Color::kGreen : check.verdict == Verdict::kWarn ? Color::kYellow : Color::kRed;
    text += Painted(VerdictName(check.verdict), color, context.color) + "  " + check.name + std::string(width - check.name.size() + 2, ' ') +
            PrintableSentence(check.seen) + "\n";
    if (!check.advice.empty()) text += std::string(width + 8, ' ') + "-> " + check.advice + "\n";
  }
  return text;
}

}  // namespace

int Doctor(const DoctorOptions& options, const Context& context) {
  JobFile file;
  const bool with_job = !options.file.empty();
  if (with_job) {
    file = ReadJobFile(options.file, options.set);
    if (!file.problems.empty()) return RefuseFile(file, context);
  }
  const v1::JobSpec* job = with_job ? &file.spec : nullptr;
  std::string folder = options.folder;
  if (folder.empty() && with_job) folder = file.spec.output().folder();
  if (folder.empty()) folder = StateFolder();

  DoctorFigures figures;
  ReadMachine(folder, &figures);
  AskWorker(job, &figures);
  const std::vector<DoctorCheck> checks = Examine(figures, job);
  Verdict worst = Verdict::kPass;
  Json list = Json::array();
  for (const DoctorCheck& check : checks) {
    worst = std::max(worst, check.verdict);
    list.push_back({{"name", check.name}, {"verdict", VerdictName(check.verdict)}, {"seen", check.seen}, {"advice", check.advice}});
  }
  if (context.json) {
    *context.out << JsonText({{"verdict", VerdictName(worst)}, {"checks", std::move(list)}});
  } else {
    *context.out << CheckLines(checks, context);
  }
  return worst == Verdict::kFail ? kExitUsage : kExitOk;
}

}  // namespace hierad
