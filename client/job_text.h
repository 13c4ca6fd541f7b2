// Jobs, nodes and checkpoints as text for people. What the server sent is escaped: it holds others' names and messages.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/context.h"
#include "hierad/v1/control.pb.h"

namespace hierad {

std::string StateText(v1::JobState state, bool color);
// Names of columns, as `list --columns` takes them; InvalidArgument names those there are. Empty: the usual ones.
absl::StatusOr<std::vector<std::string>> ParseColumns(const std::string& columns);
std::string ColumnNames();   // "id, name, ..."
std::string JobTable(const std::vector<v1::Job>& jobs, const std::vector<std::string>& columns, const Context& context);
std::string JobDetails(const v1::Job& job, const std::vector<v1::CheckpointInfo>& checkpoints, const Context& context);
std::string CheckpointTable(const std::vector<v1::CheckpointInfo>& checkpoints);
std::string NodeTable(const std::vector<v1::Node>& nodes, const Context& context);

// "npy /data/eeg.npy"; "synthetic (random numbers)", so that nobody takes its figures for a data set's.
std::string DataText(const v1::JobSpec& spec);
// "job 7 (eeg-base): FAILED after 120 of 1000 steps, CUDA_OOM: ..."
std::string EndSentence(const v1::Job& job, bool color);

// 0, 100, 103 of a job that has ended; 101 of any other.
ExitCode ExitCodeOf(const v1::Job& job);

}  // namespace hierad
