// job.yaml -> JobSpec and back, driven by the (key) annotations of job.proto: there is no second list of keys.
// Strict: an unknown or doubled key, a wrong type, an alias, a tag, a value out of range is refused with file, line,
// path, value, what is allowed, and the nearest known key. At most 64 KiB, depth 16. No exception leaves.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

struct JobYamlOptions {
  std::string file_name = "job.yaml";   // for messages
  std::string base_folder;              // absolute; relative paths are resolved against it (empty: left as they are)
  // "section.key=value", applied over the file, in order. The value is YAML; null takes the key back to its default.
  std::vector<std::string> overrides;
  std::string override_folder;          // as base_folder, for paths in overrides
};

// Where each key that was given came from: path -> "job.yaml:3" or "--set".
using KeyOrigins = std::map<std::string, std::string>;

// Parses; does not fill defaults. All problems found are in the message, a line each: `file:line: path: problem`.
absl::StatusOr<v1::JobSpec> ParseJobYaml(std::string_view text, const JobYamlOptions& options,
                                         KeyOrigins* origins = nullptr);
absl::StatusOr<v1::JobSpec> ReadJobYaml(const std::string& path);
// ParseJobYaml of a file, with file_name and base_folder set from its path.
absl::StatusOr<v1::JobSpec> ReadJobYaml(const std::string& path, JobYamlOptions options, KeyOrigins* origins);

// Fills every key that has a fixed default and is not set. Idempotent.
void FillDefaults(v1::JobSpec* spec);

// A job as YAML that parses back to the same JobSpec.
std::string ToJobYaml(const v1::JobSpec& spec);

// The same, each key with its origin as a comment: from `origins`, else "default" where it equals the fixed default,
// else "derived". Keys without a value are comments.
std::string ExplainedJobYaml(const v1::JobSpec& spec, const KeyOrigins& origins);

// configs/reference.yaml: every key with its default, range and meaning.
std::string ReferenceYaml();

}  // namespace hierad
