// The keys of job.yaml, read once from the (key) annotations of job.proto, and the checks of a single value. Shared by
// job_yaml (which adds lines) and job_validate.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "hierad/v1/job.pb.h"
#include "hierad/v1/key.pb.h"

namespace hierad {

struct JobKey {
  std::string path;                                         // "optimizer.lr", "name"
  const google::protobuf::FieldDescriptor* section;         // of JobSpec; nullptr: a key at the top
  const google::protobuf::FieldDescriptor* field;
  const v1::Key* options;
};

const std::vector<JobKey>& JobKeys();                       // in the order of job.proto
const JobKey* FindJobKey(std::string_view path);            // nullptr: unknown
const google::protobuf::FieldDescriptor* FindJobSection(std::string_view name);

// The known key (or section) that someone who wrote `path` most likely meant, across sections; empty: none is near.
std::string NearestJobKey(std::string_view path);

// The message that holds the key; nullptr where its section is absent. Mutable: made if absent.
const google::protobuf::Message* SectionOf(const v1::JobSpec& spec, const JobKey& key);
google::protobuf::Message* MutableSectionOf(v1::JobSpec* spec, const JobKey& key);
bool IsSet(const v1::JobSpec& spec, const JobKey& key);     // a list: not empty

// "an integer in [1, 64]", "a list of 1 to 3 integers in [1, 1024]", "one of fp32, bf16", "text".
std::string KindOf(const JobKey& key);

// What is wrong with a set value: range, words, length, illegal characters, name and path rules. nullopt: legal.
// `absolute`: a path must be absolute and free of "..".
std::optional<std::string> ValueProblem(const v1::JobSpec& spec, const JobKey& key, bool absolute);

// The set value as YAML.
std::string ValueYaml(const v1::JobSpec& spec, const JobKey& key);

// Shortest decimal text that reads back as the same double; always with '.', 'e' or a word in it.
std::string DoubleText(double value);

}  // namespace hierad
