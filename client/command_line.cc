#include "client/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "client/command_help.h"
#include "client/commands.h"
#include "client/worker_tool.h"
#include "client/job_text.h"
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
  ExportCommandOptions exported;
  DoctorOptions doctor;
  MetricsOptions metrics;
  TopOptions top;
  std::vector<uint64_t> wait_ids;
  double wait_timeout_s = 0;
  uint64_t id = 0;
  std::string run_folder;
  std::vector<std::string> probe_arguments;
  bool now = false;
  CheckpointOptions checkpoint;
  bool no_wait = false;
  std::vector<std::string> changes;
  GarbageOptions garbage;
  std::string node, shell;
};

// CLI11 takes "-1" for 18446744073709551615.
std::string CheckId(const std::string& text) {
  const bool digits = !text.empty() && text.size() <= 20 && text.find_first_not_of("0123456789") == std::string::npos;
  return digits ? "" : "\"" + Printable(text, 40) + "\" is not the number of a job";
}

// "90s", "30m", "12h", "7d", or seconds, as seconds.
const CLI::Validator kTime(
    [](std::string& text) -> std::string {
      double scale = 1;
      std::string number = text;
      if (const size_t unit = std::string_view("smhd").find(text.empty() ? ' ' : text.back()); unit != std::string::npos) {
        constexpr double kScales[] = {1, 60, 3600, 86400};
        scale = kScales[unit];
        number.pop_back();
      }
      double value = 0;
      const auto parsed = std::from_chars(number.data(), number.data() + number.size(), value);
      if (parsed.ec != std::errc() || parsed.ptr != number.data() + number.size() || !(value > 0 && value * scale < 1e10)) {
        return "\"" + Printable(text, 40) + "\" is no time; write 90s, 30m, 12h or 7d";
      }
      text = std::to_string(value * scale);
      return "";
    },
    "");

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
  plan->add_option("--memory", f->plan.memory, "Tell the largest batch that fits in so much memory, such as 80GiB; default: the card's")
      ->type_name("SIZE");
  plan->add_option("--fit", f->plan.fit, "Say what fits into so much memory: which stages to checkpoint, which batches (80GiB)")
      ->type_name("SIZE");
  plan->add_option("--samples", f->plan.samples, "Samples of the data set, for steps and time of an epoch (known for data.source synthetic)")
      ->type_name("N")->check(CLI::Range(int64_t{1}, int64_t{1000000000000}));
}

void AddJobs(CLI::App& app, Flags* f) {
  CLI::App* list = Command(app, "list", "The newest jobs");
  list->add_option("--state", f->list.states, "Only jobs in this state; may be repeated")->type_name("STATE")->allow_extra_args(false)->take_all();
  list->add_option("--name", f->list.name, "Only jobs whose name contains this")->type_name("TEXT");
  list->add_option("--submitter", f->list.submitter, "Only this user's jobs")->type_name("USER");
  list->add_option("--since", f->list.since_s, "Only jobs submitted so long ago at most: 90s, 30m, 12h, 7d")->type_name("TIME")->transform(kTime);
  list->add_option("--columns", f->list.columns, "Which, in order: " + ColumnNames())->type_name("A,B");
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
  logs->add_option("--attempt", f->logs.attempt, "Only what this attempt printed; default: all")->type_name("N")->check(CLI::Range(1, 1000000));
  logs->add_option("--since", f->logs.since_s, "Only lines of the last while: 90s, 30m, 12h, 7d")->type_name("TIME")->transform(kTime);
  logs->add_option("--grep", f->logs.grep, "Only lines with a match of this regular expression")->type_name("REGEX");
  logs->add_flag("--raw", f->logs.raw, "Bytes as they are; control characters are not made visible");
  CLI::App* metrics = JobCommand(app, f, "metrics", "Every step of a job: -o csv or json, or a curve");
  const auto steps = [metrics](const char* flag, int64_t* value, const char* about) {
    metrics->add_option(flag, *value, about)->type_name("STEP")->check(CLI::Range(int64_t{1}, int64_t{1000000000}));
  };
  steps("--from", &f->metrics.from, "From this step on");
  steps("--to", &f->metrics.to, "Up to this step");
  steps("--every", &f->metrics.every, "Only steps that it divides, and the newest");
  metrics->add_flag("--plot", f->metrics.plot, "Draw a curve in the terminal");
  metrics->add_option("--column", f->metrics.column, "What the curve shows, by its name in metrics.jsonl")->type_name("NAME")->capture_default_str();
  metrics->add_option("--file", f->metrics.file, "Write the curve to this file, an SVG or PNG")->type_name("FILE.svg|.png");
  JobCommand(app, f, "checkpoints", "The checkpoints of a job");
}

void AddExport(CLI::App& app, Flags* f) {
  CLI::App* command = Command(app, "export", "Write a run's weights as one file for PyTorch, and show how it is loaded");
  command->add_option("source", f->exported.source, "The job's number, a run's folder (both: the newest checkpoint), or one checkpoint's folder")
      ->required()->type_name("JOB|FOLDER");
  command->add_option("--to", f->exported.to, "safetensors: FAIR's names; timm: timm's names")
      ->check(CLI::IsMember({"safetensors", "timm"}))->capture_default_str();
  // Before the program's own -o, which here is --output alone.
  command->add_option("-o,--out", f->exported.out, "File to write; default: in the run's exported/")->type_name("FILE");
}

void AddDoctor(CLI::App& app, Flags* f) {
  CLI::App* command = Command(app, "doctor", "Check this machine, and what a job would meet on it; exit code 1 if a check fails");
  command->add_option("file", f->doctor.file, "job.yaml: also check its shapes, memory, data rate and checkpoints (some seconds)")->type_name("FILE");
  command->add_option("--set", f->doctor.set, "Over the file: section.key=value")->type_name("KEY=VALUE")->allow_extra_args(false)->take_all();
  command->add_option("--folder", f->doctor.folder, "Where checkpoints would go; default: the job's output.folder, else hierad's state folder")->type_name("FOLDER");
}

void AddWishes(CLI::App& app, Flags* f) {
  CLI::App* cancel = JobCommand(app, f, "cancel", "End a job after its current step");
  cancel->add_flag("--now", f->now, "Kill it at once: no last step, no last checkpoint");
  JobCommand(app, f, "pause", "Save a job's state after its current step and give its slots back");
  JobCommand(app, f, "resume", "Go on with a paused job");
  CLI::App* checkpoint = JobCommand(app, f, "checkpoint", "Save a checkpoint of a running job now");
  checkpoint->add_flag("--no-wait", f->no_wait, "Ask for it, do not wait until it is there");
  checkpoint->add_option("--timeout", f->checkpoint.timeout_s, "Wait so many seconds at most (exit code 101)")
      ->type_name("S")->check(CLI::Range(0.001, 1e8))->capture_default_str();
  CLI::App* set = JobCommand(app, f, "set", "Change a job that lives: lr=VALUE, the peak learning rate, from its next step on; log_level=debug, info, warn or error, of its ranks, at once");
  set->add_option("changes", f->changes, "lr=VALUE, log_level=LEVEL")->required()
      ->type_name("KEY=VALUE:{lr=,log_level=debug,log_level=info,log_level=warn,log_level=error}");
  CLI::App* gc = Command(app, "gc", "Remove the checkpoints of jobs that ended long ago; exported weights, metrics and logs stay");
  gc->add_flag("--dry-run", f->garbage.dry_run, "Only show what would go");
  gc->add_option("--older-than", f->garbage.older_than_days, "Only jobs that ended so many days ago")
      ->type_name("DAYS")->check(CLI::Range(0.0, 1e5))->capture_default_str();
  gc->add_flag("--whole-runs", f->garbage.whole_runs, "The whole run folders, where hierad has named them (no output.folder)");
  for (const auto& [name, about] : {std::pair{"drain", "Place nothing more on a node; what runs there goes on"}, std::pair{"undrain", "Place work on a node again, on cards that had a fault too"}}) {
    Command(app, name, about)->add_option("node", f->node, "The node's name")->required()->type_name("NODE");
  }
}

// One option of the parser, for completion and the man page. The help flag is everywhere and tells nothing.
std::vector<OptionHelp> HelpOfOptions(const CLI::App& app) {
  std::vector<OptionHelp> options;
  for (const CLI::Option* option : app.get_options()) {
    if (option->check_name("--help")) continue;
    OptionHelp& help = options.emplace_back();
    help.about = option->get_description();
    help.positional = option->get_positional();
    help.many = option->get_expected_max() > 1;
    if (help.positional) help.names = {option->get_name()};
    for (const std::string& name : option->get_snames()) help.names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) help.names.push_back("--" + name);
    if (option->get_items_expected_max() > 0) help.value = option->get_type_name();
    // CLI11 puts a check's words behind the name: "FORMAT:{text,json}".
    const size_t brace = help.value.find(":{");
    if (brace != std::string::npos) {
      help.words = Split(help.value.substr(brace + 2, help.value.size() - brace - 3), ',');
    }
    help.value = help.value.substr(0, help.value.find(':'));
  }
  return options;
}

ProgramHelp HelpOf(const CLI::App& app) {
  ProgramHelp help{app.get_name(), app.get_description(), kExitCodes, HelpOfOptions(app), {}};
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    help.commands.push_back({command->get_name(), command->get_description(), HelpOfOptions(*command)});
  }
  return help;
}

// For a word that the parser did not know: "did you mean ...?", or "".
std::string NearestWord(int argc, const char* const* argv, const ProgramHelp& help) {
  const CommandHelp* command = nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string word = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
    std::vector<std::string> known = FlagNames(help.options);
    if (command != nullptr) {
      for (const std::string& flag : FlagNames(command->options)) known.push_back(flag);
    } else if (word.rfind('-', 0) != 0) {
      known.clear();
      for (const CommandHelp& other : help.commands) {
        known.push_back(other.name);
        if (other.name == word) command = &other;
      }
    }
    if (word.size() < 2 || (command != nullptr && word.rfind('-', 0) != 0) || std::find(known.begin(), known.end(), word) != known.end()) continue;
    std::string nearest;
    int best = 1 + int(word.size()) / 3;
    for (const std::string& other : known) {
      if (const int distance = EditDistance(word, other); distance <= best) {
        best = distance - 1;
        nearest = other;
      }
    }
    return nearest.empty() || word == "--help" ? "" : "\"" + Printable(word, 40) + "\" is not known; did you mean " + nearest + "?";
  }
  return "";
}

int PrintHelp(const std::string& name, const Flags& f, const CLI::App& app, const Context& context) {
  const ProgramHelp help = HelpOf(app);
  if (name == "man") {
    *context.out << ManPage(help, std::string(Version()));
    return kExitOk;
  }
  const auto script = CompletionScript(help, f.shell);
  if (!script.ok()) return Fail(script.status(), context);
  *context.out << *script;
  return kExitOk;
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
  if (name == "metrics") return Metrics(f.id, f.metrics, context);
  if (name == "cancel") return Cancel(f.id, f.now, context);
  if (name == "pause") return Pause(f.id, context);
  if (name == "resume") return Resume(f.id, context);
  if (name == "checkpoint") return MakeCheckpoint(f.id, {!f.no_wait, f.checkpoint.timeout_s}, context);
  if (name == "set") return SetKeys(f.id, f.changes, context);
  if (name == "gc") return CollectGarbage(f.garbage, context);
  if (name == "drain" || name == "undrain") return DrainNode(f.node, name == "drain", context);
  if (name == "checkpoints") return Checkpoints(f.id, context);
  if (name == "top") return Top(f.top, context);
  if (name == "nodes") return Nodes(context);
  if (name == "doctor") return Doctor(f.doctor, context);
  if (name == "export") return Export(f.exported, context);
  return PrintVersion(context);
}

}  // namespace

int RunCommandLine(int argc, const char* const* argv, Context context) {
  // What follows the folder is the worker's own and not parsed here.
  if (argc > 2 && std::string(argv[1]) == "probe" && argv[2][0] != '-') {
    std::vector<std::string> words = {"probe", "--run", argv[2]};
    words.insert(words.end(), argv + 3, argv + argc);
    return BecomeWorkerTool(std::move(words), context);
  }
  if (argc > 2 && std::string(argv[1]) == "data" && argv[2][0] != '-') {
    return BecomeWorkerTool(std::vector<std::string>(argv + 1, argv + argc), context);
  }
  Flags flags;
  CLI::App app("hierctl: submit, watch and manage hierad's training jobs", "hierctl");
  app.require_subcommand(1);
  app.set_version_flag("--version", "hierctl " + std::string(Version()) + " (" + std::string(Commit()) + ")");
  app.add_option("--server", context.server, "hierad's address, unix:/path or host:port; also HIERAD_SERVER; default: the local one")
      ->type_name("ADDRESS");
  app.add_option("-o,--output", flags.format, "text or json (stable keys; one object, or one a line where it goes on); metrics: csv too")
      ->type_name("FORMAT")->check(CLI::IsMember({"text", "json", "csv"}))->capture_default_str();
  app.footer(kExitCodes);
  AddSubmission(app, &flags);
  AddJobs(app, &flags);
  AddExport(app, &flags);
  AddDoctor(app, &flags);
  AddWishes(app, &flags);
  CLI::App* top = Command(app, "top", "What runs now: loss curves, step budgets, slots, alerts; drawn again and again on a terminal");
  top->add_option("--every", flags.top.every_s, "Seconds between two looks")->type_name("S")->check(CLI::Range(0.2, 3600.0))->capture_default_str();
  top->add_flag("--once", flags.top.once, "Print it once");
  Command(app, "nodes", "The nodes, their slots and who uses them");
  Command(app, "version", "Versions of hierctl and of the hierad it reaches");
  Command(app, "completion", "Completion for a shell: source <(hierctl completion bash)")
      ->add_option("shell", flags.shell, "Which shell")->required()->type_name("SHELL")->check(CLI::IsMember({"bash", "zsh", "fish"}));
  Command(app, "man", "This help as a man page: hierctl man | man -l -");
  CLI::App* probe = app.add_subcommand("probe", "Judge a run's weights by a linear probe: hiera-worker probe --run RUN_FOLDER ...");
  probe->add_option("run_folder", flags.run_folder, "The run's folder")->required()->type_name("RUN_FOLDER");
  probe->add_option("arguments", flags.probe_arguments, "Handed to hiera-worker; hiera-worker probe --help lists them");
  CLI::App* data = app.add_subcommand("data", "Inspect training data, measure the loader, prepare recordings: hiera-worker data inspect|bench|prepare ...");
  data->add_option("arguments", flags.probe_arguments, "Handed to hiera-worker; hiera-worker data --help lists them")->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (app.exit(e, *context.out, *context.err) == 0) return kExitOk;
    if (const std::string nearest = NearestWord(argc, argv, HelpOf(app)); !nearest.empty()) *context.err << nearest << "\n";
    return kExitUsage;
  }
  context.json = flags.format == "json";
  context.csv = flags.format == "csv";
  const std::string name = app.get_subcommands().front()->get_name();
  if (name == "completion" || name == "man") return PrintHelp(name, flags, app, context);
  if (context.csv && name != "metrics") return Fail(absl::InvalidArgumentError("-o csv is for hierctl metrics; " + name + " knows text and json"), context);
  return Dispatch(name, flags, context);
}

}  // namespace hierad
