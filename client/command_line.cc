#include "client/command_line.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/text.h"
#include "client/commands.h"
#include "hierad/version.h"

namespace hierad {
namespace {

constexpr char kExitCodes[] =
    "Exit codes: 0 done, or the job SUCCEEDED; 1 wrong usage or a job that was refused; 2 hierad cannot be reached;\n"
    "100 the job FAILED; 101 not finished; 102 no such job; 103 the job was CANCELLED.\n";

// What the parser fills in.
struct Flags {
  std::string format = "text";
  SubmitOptions submit, validate;
  PlanCommandOptions plan;
  ListOptions list;
  WatchOptions watch;
  LogsOptions logs;
  std::vector<uint64_t> wait_ids;
  double wait_timeout_s = 0;
  uint64_t id = 0;
  std::string run_folder;
  std::vector<std::string> probe_arguments;
};

// CLI11 takes "-1" for 18446744073709551615.
std::string CheckId(const std::string& text) {
  const bool digits = !text.empty() && text.size() <= 20 && text.find_first_not_of("0123456789") == std::string::npos;
  return digits ? "" : "\"" + Printable(text, 40) + "\" is not the number of a job";
}

CLI::App* Command(CLI::App& app, const std::string& name, const std::string& about) {
  return app.add_subcommand(name, about)->fallthrough();
}

CLI::App* JobCommand(CLI::App& app, Flags* flags, const std::string& name, const std::string& about) {
  CLI::App* command = Command(app, name, about);
  command->add_option("id", flags->id, "The job's number")->required()->type_name("ID")->check(CheckId);
  return command;
}

template <typename Options>   // with a file and overrides of it
void AddFile(CLI::App* command, Options* options) {
  command->add_option("file", options->file, "job.yaml; - reads standard input")->required()->type_name("FILE");
  command->add_option("--set", options->set, "Over the file: section.key=value; null takes a key back to its default. May be repeated")
      ->type_name("KEY=VALUE")->allow_extra_args(false)->take_all();
}

void AddSubmission(CLI::App& app, Flags* f) {
  CLI::App* submit = Command(app, "submit", "Queue a job");
  AddFile(submit, &f->submit);
  submit->add_flag("--wait", f->submit.wait, "Wait until the job has ended; the exit code tells how");
  submit->add_flag("--follow", f->submit.follow, "Watch the job until it has ended; the exit code tells how");
  submit->add_flag("--dry-run", f->submit.dry_run, "Print every key's effective value and where it comes from; queue nothing");
  submit->add_option("--client-key", f->submit.client_key, "The same key makes the same job, never a second one; default: a random one")
      ->type_name("KEY");
  AddFile(Command(app, "validate", "Check a job file; needs no hierad, asks it if it is there"), &f->validate);
  CLI::App* plan = Command(app, "plan", "What a job needs and costs: memory, work, the fastest possible step, the largest batch");
  AddFile(plan, &f->plan);
  plan->add_option("--card", f->plan.card, "The floor is this card's")->type_name("NAME")->capture_default_str();
  plan->add_option("--memory", f->plan.memory_gib, "Memory that the largest batch must fit in; default: the card's")
      ->type_name("GIB")->check(CLI::PositiveNumber);
}

void AddJobs(CLI::App& app, Flags* f) {
  CLI::App* list = Command(app, "list", "The newest jobs");
  list->add_option("--state", f->list.states, "Only jobs in this state; may be repeated")->type_name("STATE")->allow_extra_args(false)->take_all();
  list->add_option("--limit", f->list.limit, "At most so many")->type_name("N")->check(CLI::Range(1, 1000))->capture_default_str();
  JobCommand(app, f, "describe", "Everything about one job");
  CLI::App* watch = JobCommand(app, f, "watch", "Watch a job until it has ended");
  watch->add_option("--every", f->watch.every_steps, "Where output is no terminal: a line every N steps; default: about every 2 s")
      ->type_name("N")->check(CLI::Range(int64_t{1}, int64_t{1000000000}));
  watch->add_option("--timeout", f->watch.timeout_s, "Stop watching after so many seconds (exit code 101)")->type_name("S")->check(CLI::Range(0.001, 1e8));
  CLI::App* wait = Command(app, "wait", "Wait until jobs have ended; the exit code is the first that did not succeed");
  wait->add_option("ids", f->wait_ids, "The jobs' numbers")->required()->type_name("ID")->check(CheckId);
  wait->add_option("--timeout", f->wait_timeout_s, "At most so many seconds (exit code 101)")->type_name("S")->check(CLI::Range(0.001, 1e8));
  CLI::App* logs = JobCommand(app, f, "logs", "What a rank printed");
  logs->add_option("--rank", f->logs.rank, "Of which rank")->type_name("N")->check(CLI::NonNegativeNumber)->capture_default_str();
  logs->add_flag("-f,--follow", f->logs.follow, "Go on until the job has ended");
  logs->add_option("--tail", f->logs.tail_lines, "Only the last N lines")->type_name("N")->check(CLI::Range(uint64_t{1}, uint64_t{1000000000}));
  logs->add_flag("--raw", f->logs.raw, "Bytes as they are; control characters are not made visible");
  JobCommand(app, f, "cancel", "End a job after its current step");
  JobCommand(app, f, "checkpoints", "The checkpoints of a job");
}

int Dispatch(const std::string& name, const Flags& f, const Context& context) {
  if (name == "submit") return Submit(f.submit, context);
  if (name == "validate") return Validate(f.validate, context);
  if (name == "plan") return PlanJob(f.plan, context);
  if (name == "list") return List(f.list, context);
  if (name == "describe") return Describe(f.id, context);
  if (name == "watch") return Watch(f.id, f.watch, context);
  if (name == "wait") return Wait(f.wait_ids, f.wait_timeout_s, context);
  if (name == "logs") return Logs(f.id, f.logs, context);
  if (name == "cancel") return Cancel(f.id, context);
  if (name == "checkpoints") return Checkpoints(f.id, context);
  if (name == "nodes") return Nodes(context);
  return PrintVersion(context);
}

}  // namespace

int RunCommandLine(int argc, const char* const* argv, Context context) {
  // What follows the folder is the worker's own and not parsed here.
  if (argc > 2 && std::string(argv[1]) == "probe" && argv[2][0] != '-') {
    return Probe(argv[2], std::vector<std::string>(argv + 3, argv + argc), context);
  }
  if (argc > 2 && std::string(argv[1]) == "data" && argv[2][0] != '-') {
    return Data(std::vector<std::string>(argv + 2, argv + argc), context);
  }
  Flags flags;
  CLI::App app("hierctl: submit, watch and manage hierad's training jobs", "hierctl");
  app.require_subcommand(1);
  app.set_version_flag("--version", "hierctl " + std::string(Version()) + " (" + std::string(Commit()) + ")");
  app.add_option("--server", context.server, "hierad's address, unix:/path or host:port; also HIERAD_SERVER; default: the local one")
      ->type_name("ADDRESS");
  app.add_option("-o,--output", flags.format, "text or json (stable keys; one object, or one a line where it goes on)")
      ->type_name("FORMAT")->check(CLI::IsMember({"text", "json"}))->capture_default_str();
  app.footer(kExitCodes);
  AddSubmission(app, &flags);
  AddJobs(app, &flags);
  Command(app, "nodes", "The nodes, their slots and who uses them");
  Command(app, "version", "Versions of hierctl and of the hierad it reaches");
  CLI::App* probe = app.add_subcommand("probe", "Judge a run's weights by a linear probe: hiera-worker probe --run RUN_FOLDER ...");
  probe->add_option("run_folder", flags.run_folder, "The run's folder")->required()->type_name("RUN_FOLDER");
  probe->add_option("arguments", flags.probe_arguments, "Handed to hiera-worker; hiera-worker probe --help lists them");
  CLI::App* data = app.add_subcommand("data", "Inspect training data, measure the loader, prepare recordings: hiera-worker data inspect|bench|prepare ...");
  data->add_option("arguments", flags.probe_arguments, "Handed to hiera-worker; hiera-worker data --help lists them")->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e, *context.out, *context.err) == 0 ? kExitOk : kExitUsage;
  }
  context.json = flags.format == "json";
  return Dispatch(app.get_subcommands().front()->get_name(), flags, context);
}

}  // namespace hierad
