// From a job file and --set to a job that may be sent: read, filled, checked by every local rule.
#pragma once

#include <string>
#include <vector>

#include "base/job_yaml.h"

namespace hierad {

struct JobFile {
  v1::JobSpec spec;                    // defaults filled in
  KeyOrigins origins;
  std::vector<std::string> problems;   // lines, with file and line where a key is given; then `spec` is not to be used
};

// `path` "-": standard input, relative paths start at the working folder.
JobFile ReadJobFile(const std::string& path, const std::vector<std::string>& overrides);

// The job as it will run: also what the variant, the geometry and the batch decide, each key with its origin.
std::string EffectiveJobYaml(const JobFile& file);

// What the file names to be read and this machine does not have, a sentence each. Warnings: hierad's nodes may have it.
std::vector<std::string> MissingFiles(const JobFile& file);

// "mae tiny on [224], 14 mask units of which 5 are kept; 540,000 parameters; batch 64; peak rate 0.0015".
std::string JobSummary(const v1::JobSpec& spec);

}  // namespace hierad
