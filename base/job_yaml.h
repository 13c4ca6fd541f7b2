// job.yaml -> JobSpec and back, driven by the (key) annotations of job.proto: there is no second list of keys.
// Strict: an unknown or doubled key, a wrong type, an alias, a tag, a value out of range is refused with file, line,
// path, value, what is allowed, and the nearest known key. At most 64 KiB, depth 16. No exception leaves.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

struct JobYamlOptions {
  std::string file_name = "job.yaml";   // for messages
  std::string base_folder;              // absolute; relative paths are resolved against it (empty: left as they are)
};

// Parses; does not fill defaults. All problems found are in the message, a line each: `file:line: path: problem`.
absl::StatusOr<v1::JobSpec> ParseJobYaml(std::string_view text, const JobYamlOptions& options);
absl::StatusOr<v1::JobSpec> ReadJobYaml(const std::string& path);

// Fills every key that has a fixed default and is not set. Idempotent.
void FillDefaults(v1::JobSpec* spec);

// A job as YAML that parses back to the same JobSpec.
std::string ToJobYaml(const v1::JobSpec& spec);

// configs/reference.yaml: every key with its default, range and meaning.
std::string ReferenceYaml();

}  // namespace hierad
