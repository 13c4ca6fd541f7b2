// The commands of hierctl, free of the command line: each takes its options, writes to the context and gives the exit code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/connection.h"
#include "client/context.h"
#include "client/job_file.h"

namespace hierad {

// submit.cc
struct SubmitOptions {
  std::string file;                  // "-": standard input
  std::vector<std::string> set;      // key=value
  bool wait = false;
  bool follow = false;
  bool dry_run = false;
  std::string client_key;            // empty: a random one
};
int Submit(const SubmitOptions& options, const Context& context);
int Validate(const SubmitOptions& options, const Context& context);   // file and set
int RefuseFile(const JobFile& file, const Context& context);          // says a file's problems

// plan_command.cc: what a job needs and costs, by arithmetic alone; asks nobody.
struct PlanCommandOptions {
  std::string file;
  std::vector<std::string> set;
  std::string card = "H200";
  std::string memory;                // a size such as 80GiB; empty: the card's memory
  std::string fit;                   // the same; empty: not asked what fits
  int64_t samples = 0;               // 0: as the job says, if it does
};
int PlanJob(const PlanCommandOptions& options, const Context& context);

// jobs.cc
struct ListOptions {
  std::vector<std::string> states;   // names, any case; empty: all
  uint32_t limit = 50;
  std::string name;                  // only names that contain it
  std::string submitter;             // only this user's
  double since_s = 0;                // only jobs submitted within so many seconds; 0: all
  std::string columns;               // "id,name,state"; empty: the usual ones
};
int List(const ListOptions& options, const Context& context);
int Describe(uint64_t job_id, const Context& context);
int Checkpoints(uint64_t job_id, const Context& context);

// wishes.cc
struct CheckpointOptions {
  bool wait = true;                  // until it is there
  double timeout_s = 600;
};
struct GarbageOptions {
  bool dry_run = false;
  bool whole_runs = false;
  double older_than_days = 30;
};
int Cancel(uint64_t job_id, bool now, const Context& context);
int Pause(uint64_t job_id, const Context& context);
int Resume(uint64_t job_id, const Context& context);
int MakeCheckpoint(uint64_t job_id, const CheckpointOptions& options, const Context& context);
int SetKeys(uint64_t job_id, const std::vector<std::string>& assignments, const Context& context);   // "lr=3e-4", "log_level=debug"
int DrainNode(const std::string& node, bool drained, const Context& context);
int CollectGarbage(const GarbageOptions& options, const Context& context);

// watch.cc
struct WatchOptions {
  int64_t every_steps = 0;           // plain output: a line at each such step; 0: about every two seconds
  double timeout_s = 0;              // 0: none
};
int Watch(uint64_t job_id, const WatchOptions& options, const Context& context);
int Wait(const std::vector<uint64_t>& job_ids, double timeout_s, const Context& context);
// The same over a connection that is there.
int WatchJob(Connection& connection, uint64_t job_id, const WatchOptions& options, const Context& context);

// logs.cc
struct LogsOptions {
  int32_t rank = 0;
  bool follow = false;
  uint64_t tail_lines = 0;           // 0: everything
  bool raw = false;                  // bytes as they are, control characters included
  int32_t attempt = 0;               // only what it printed; 0: all
  double since_s = 0;                // only lines of the last so many seconds; 0: all
  std::string grep;                  // only lines with a match of this regular expression (ECMAScript)
};
int Logs(uint64_t job_id, const LogsOptions& options, const Context& context);

// metrics.cc
struct MetricsOptions {
  int64_t from = 0, to = 0, every = 0;   // steps; 0: no bound, every one
  bool plot = false;                     // a curve of `column` instead of numbers
  std::string column = "loss";
  std::string file;                      // the curve as SVG
};
int Metrics(uint64_t job_id, const MetricsOptions& options, const Context& context);

// top.cc
struct TopOptions {
  double every_s = 2;
  bool once = false;                 // also on a terminal
};
int Top(const TopOptions& options, const Context& context);

// cluster.cc
int Nodes(const Context& context);
int PrintVersion(const Context& context);

// doctor.cc: looks at this machine, and at what a job would meet on it.
struct DoctorOptions {
  std::string file;                  // empty: no job
  std::vector<std::string> set;
  std::string folder;                // whose disk is measured; empty: the job's output.folder, else hierad's usual place
};
int Doctor(const DoctorOptions& options, const Context& context);

// export.cc: becomes `hiera-worker export ...`.
struct ExportCommandOptions {
  std::string source;                // a job's number, a run's folder, a checkpoint's folder
  std::string to = "safetensors";    // or timm
  std::string out;                   // file; empty: in the run's exported/
};
int Export(const ExportCommandOptions& options, const Context& context);

}  // namespace hierad
