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
  double memory_gib = 0;             // 0: the card's
};
int PlanJob(const PlanCommandOptions& options, const Context& context);

// jobs.cc
struct ListOptions {
  std::vector<std::string> states;   // names, any case; empty: all
  uint32_t limit = 50;
};
int List(const ListOptions& options, const Context& context);
int Describe(uint64_t job_id, const Context& context);
int Cancel(uint64_t job_id, const Context& context);
int Checkpoints(uint64_t job_id, const Context& context);

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
};
int Logs(uint64_t job_id, const LogsOptions& options, const Context& context);

// cluster.cc
int Nodes(const Context& context);
int PrintVersion(const Context& context);

// probe.cc: becomes `hiera-worker probe --run FOLDER ...`; returns only if that cannot be started.
int Probe(const std::string& run_folder, const std::vector<std::string>& arguments, const Context& context);
int Data(const std::vector<std::string>& arguments, const Context& context);   // `hiera-worker data ...`, in the same way

}  // namespace hierad
