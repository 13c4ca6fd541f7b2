#include "base/job_yaml.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "base/fs.h"
#include "base/job_keys.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"
#include "base/yaml_tree.h"

namespace hierad {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kProblemsShown = 40;   // a file that is no job at all has one for every line

std::string Quote(std::string_view text) { return "\"" + Printable(text, 80) + "\""; }

// One parsed scalar, or what is wrong with it.
template <typename T>
struct Parsed {
  T value{};
  std::string problem;   // empty: none
};

bool IsInteger(std::string_view text) {
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

template <typename T>
Parsed<T> ParseInteger(const YamlNode& node, const std::string& kind) {
  std::string_view text = node.text;
  if (!IsInteger(text)) return {{}, Quote(text) + " is not " + kind};
  const std::string_view digits = text[0] == '-' || text[0] == '+' ? text.substr(1) : text;
  if (digits.size() > 1 && digits[0] == '0') {
    return {{}, Quote(text) + " has a leading zero (octal in some readers); write it without"};
  }
  if (text[0] == '+') text.remove_prefix(1);
  Parsed<T> parsed;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), parsed.value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) {
    parsed.problem = std::string(Printable(text, 80)) + " is not allowed; it must be " + kind;
  }
  return parsed;
}

Parsed<double> ParseDouble(const YamlNode& node, const std::string& kind) {
  std::string_view text = node.text;
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  const bool decimal = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || c == '.' || c == 'e' || c == 'E' || c == '-' || c == '+';
  });
  Parsed<double> parsed;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), parsed.value);
  if (decimal && result.ec == std::errc::result_out_of_range) {
    return {{}, Quote(node.text) + " is beyond what a double can hold; it must be " + kind};
  }
  if (!decimal || result.ec != std::errc() || result.ptr != text.data() + text.size()) {
    return {{}, Quote(node.text) + " is not " + kind};
  }
  return parsed;
}

// Sets one scalar (or appends it to a list). Returns the problem, or "".
std::string SetScalar(const YamlNode& node, const JobKey& key, Message* section) {
  const FieldDescriptor* f = key.field;
  const auto* r = section->GetReflection();
  const std::string kind = KindOf(key);
  const std::string element = f->is_repeated() ? " (an element of " + kind + ")" : "";
  if (node.quoted && f->cpp_type() != FieldDescriptor::CPPTYPE_STRING) {
    return Quote(node.text) + " is in quotes, so it is text; write it without" + element;
  }
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      f->is_repeated() ? r->AddString(section, f, node.text) : r->SetString(section, f, node.text);
      return "";
    case FieldDescriptor::CPPTYPE_BOOL: {
      if (node.text != "true" && node.text != "false") return Quote(node.text) + " is not true or false" + element;
      const bool value = node.text == "true";
      f->is_repeated() ? r->AddBool(section, f, value) : r->SetBool(section, f, value);
      return "";
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const auto parsed = ParseDouble(node, kind);
      if (!parsed.problem.empty()) return parsed.problem;
      f->is_repeated() ? r->AddDouble(section, f, parsed.value) : r->SetDouble(section, f, parsed.value);
      return "";
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      const auto parsed = ParseInteger<uint64_t>(node, kind);
      if (parsed.problem.empty()) r->SetUInt64(section, f, parsed.value);
      return parsed.problem;
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const auto parsed = ParseInteger<int64_t>(node, kind);
      if (parsed.problem.empty()) r->SetInt64(section, f, parsed.value);
      return parsed.problem;
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      const auto parsed = ParseInteger<int32_t>(node, kind);
      if (!parsed.problem.empty()) return parsed.problem;
      f->is_repeated() ? r->AddInt32(section, f, parsed.value) : r->SetInt32(section, f, parsed.value);
      return "";
    }
    default: return "has a type that job.yaml does not know";
  }
}

// Sets a key from its node. Returns the problem, or ""; the value is then not set.
std::string SetValue(const YamlNode& node, const JobKey& key, Message* section) {
  const auto* r = section->GetReflection();
  r->ClearField(section, key.field);
  std::string problem;
  if (node.kind == YamlNode::kRefused) problem = node.text;
  else if (node.kind == YamlNode::kNull) problem = "has no value; give " + KindOf(key) + ", or leave the key out";
  else if (node.kind == YamlNode::kMap) problem = "is a group of keys; it must be " + KindOf(key);
  else if (!key.field->is_repeated() && node.kind == YamlNode::kList) problem = "is a list; it must be " + KindOf(key);
  else if (!key.field->is_repeated()) problem = SetScalar(node, key, section);
  else if (node.kind == YamlNode::kScalar) {
    problem = Quote(node.text) + " is a single value; write a list, [" + Printable(node.text, 80) + "]";
  } else {
    for (size_t i = 0; i < node.items.size() && problem.empty(); ++i) {
      const YamlNode& item = node.items[i];
      if (item.kind == YamlNode::kScalar) problem = SetScalar(item, key, section);
      else if (item.kind == YamlNode::kRefused) problem = item.text;
      else problem = "element " + std::to_string(i + 1) + " is not a plain value; it must be " + KindOf(key);
    }
    if (problem.empty() && node.items.empty()) problem = "the list is empty; give " + KindOf(key);
  }
  if (!problem.empty()) r->ClearField(section, key.field);
  return problem;
}

// Relative to `folder`, with "." and ".." taken out.
void ResolvePath(const JobKey& key, const std::string& folder, Message* section) {
  const auto* r = section->GetReflection();
  const std::string path = r->GetString(*section, key.field);
  if (folder.empty()) return;
  std::string resolved = std::filesystem::path(JoinPath(folder, path)).lexically_normal().string();
  while (resolved.size() > 1 && resolved.back() == '/') resolved.pop_back();
  r->SetString(section, key.field, resolved);
}

class JobReader {
 public:
  explicit JobReader(const JobYamlOptions& options) : options_(options) {}

  void ReadRoot(const YamlNode& root) {
    if (root.kind == YamlNode::kNull) return Problem(1, "", "the file is empty; a job needs at least name and data.source");
    if (root.kind == YamlNode::kRefused) return Problem(root.line, "", root.text);
    if (root.kind != YamlNode::kMap) return Problem(root.line, "", "the file is not a group of keys, such as `name: first-run`");
    std::map<std::string, int> lines;
    for (const auto& [key_node, value] : root.entries) {
      const auto name = CheckedKey(key_node, "", &lines);
      if (!name) continue;
      if (const FieldDescriptor* section = FindJobSection(*name)) ReadSection(*section, key_node.line, value);
      else if (const JobKey* key = FindJobKey(*name); key && !key->section) ReadKey(*key, key_node.line, value);
      else Unknown(File(key_node.line), *name);
    }
  }

  void Override(const std::string& assignment) {
    const std::string where = "--set " + Printable(assignment, 120);
    const size_t equals = assignment.find('=');
    if (equals == std::string::npos || equals == 0) {
      return Add(where, "", "write it as key=value, for example --set optimizer.lr=1e-4");
    }
    const std::string path = assignment.substr(0, equals);
    const JobKey* key = FindJobKey(path);
    if (!key) {
      if (FindJobSection(path)) return Add(where, path, "is a section; give one of its keys, as in --set " + path + ".KEY=VALUE");
      return Unknown(where, path);
    }
    const std::string value = assignment.substr(equals + 1);
    YamlNode node;
    if (!key->field->is_repeated() && value != "null" && (value.empty() || (value[0] != '"' && value[0] != '\''))) {
      node.kind = value.empty() ? YamlNode::kNull : YamlNode::kScalar;
      node.text = value;
    } else {
      auto tree = ParseYamlTree(value, where, limits::kJobYamlBytes, limits::kJobYamlDepth);
      if (!tree.ok()) return Add(where, path, "the value is not valid YAML");
      node = *std::move(tree);
    }
    Forget(path);
    if (value == "null") {
      if (IsSet(spec_, *key)) {
        Message* section = MutableSectionOf(&spec_, *key);
        section->GetReflection()->ClearField(section, key->field);
      }
      origins_.erase(path);
      given_.erase(path);
      return;
    }
    given_.insert(path);
    Set(*key, node, where, "--set", options_.override_folder);
  }

  absl::StatusOr<v1::JobSpec> Finish(KeyOrigins* origins) {
    for (const JobKey& key : JobKeys()) {
      if (key.options->required() && given_.count(key.path) == 0) {
        Add(options_.file_name, key.path, "is missing; give " + KindOf(key));
      }
    }
    if (problems_.empty()) {
      if (origins) *origins = std::move(origins_);
      return std::move(spec_);
    }
    std::string message;
    for (size_t i = 0; i < std::min(problems_.size(), kProblemsShown); ++i) {
      message += (i ? "\n" : "") + problems_[i].text;
    }
    if (problems_.size() > kProblemsShown) {
      message += "\nand " + std::to_string(problems_.size() - kProblemsShown) + " more problems";
    }
    return ErrorOf(v1::REASON_USER_ERROR, message);
  }

 private:
  struct Found {
    std::string path, text;
  };

  std::string File(int line) const { return options_.file_name + ":" + std::to_string(std::max(line, 1)); }

  void Add(const std::string& where, const std::string& path, const std::string& problem) {
    problems_.push_back({path, where + ": " + (path.empty() ? "" : Printable(path, 120) + ": ") + problem});
  }
  void Problem(int line, const std::string& path, const std::string& problem) { Add(File(line), path, problem); }

  // An override replaces the file's value, and with it what was wrong with that.
  void Forget(const std::string& path) {
    std::erase_if(problems_, [&](const Found& found) { return found.path == path; });
  }

  void Unknown(const std::string& where, const std::string& path) {
    const std::string nearest = NearestJobKey(path);
    std::string problem = "unknown key";
    if (!nearest.empty()) {
      problem += "; did you mean " + nearest;
      if (const JobKey* key = FindJobKey(nearest); key && key->section && path.find('.') != std::string::npos &&
          path == nearest) {
        problem += ", written as " + key->field->name() + " below " + key->section->name();
      }
      problem += "?";
    } else {
      problem += "; configs/reference.yaml lists every key";
    }
    Add(where, path, problem);
  }

  // The key's name, unless it is doubled, a merge key or no plain word.
  std::optional<std::string> CheckedKey(const YamlNode& node, const std::string& section,
                                        std::map<std::string, int>* lines) {
    const std::string prefix = section.empty() ? "" : section + ".";
    if (node.kind != YamlNode::kScalar) {
      const char* why = node.kind == YamlNode::kRefused ? node.text.c_str() : "a key must be a plain word";
      Problem(node.line, section, why);
      return std::nullopt;
    }
    if (node.text == "<<" && !node.quoted) {
      Problem(node.line, prefix + "<<", "merge keys (<<) are not supported; write the keys out");
      return std::nullopt;
    }
    const auto [first, added] = lines->emplace(node.text, node.line);
    if (!added) {
      Problem(node.line, prefix + node.text, "is given twice, on lines " + std::to_string(first->second) + " and " +
                                                 std::to_string(node.line) + "; keep one");
      return std::nullopt;
    }
    return node.text;
  }

  void ReadSection(const FieldDescriptor& section, int key_line, const YamlNode& node) {
    if (node.kind == YamlNode::kNull) return;   // a section whose keys are all commented out
    if (node.kind == YamlNode::kRefused) return Problem(node.line, section.name(), node.text);
    if (node.kind != YamlNode::kMap) {
      return Problem(key_line, section.name(), "is a section; its keys go below it, indented, one a line");
    }
    std::map<std::string, int> lines;
    for (const auto& [key_node, value] : node.entries) {
      const auto name = CheckedKey(key_node, section.name(), &lines);
      if (!name) continue;
      const std::string path = section.name() + "." + *name;
      if (const JobKey* key = FindJobKey(path)) ReadKey(*key, key_node.line, value);
      else Unknown(File(key_node.line), path);
    }
  }

  void ReadKey(const JobKey& key, int key_line, const YamlNode& node) {
    // An absent value is where the parser stopped looking, which may be lines below.
    const int line = node.kind == YamlNode::kNull ? key_line : node.line;
    given_.insert(key.path);
    Set(key, node, File(line), File(key_line), options_.base_folder);
  }

  void Set(const JobKey& key, const YamlNode& node, const std::string& where, const std::string& origin,
           const std::string& folder) {
    Message* section = MutableSectionOf(&spec_, key);
    std::string problem = SetValue(node, key, section);
    if (problem.empty()) {
      if (const auto illegal = ValueProblem(spec_, key, false)) problem = *illegal;
    }
    if (!problem.empty()) return Add(where, key.path, problem);
    if (key.options->path()) ResolvePath(key, folder, section);
    origins_[key.path] = origin;
  }

  const JobYamlOptions& options_;
  v1::JobSpec spec_;
  KeyOrigins origins_;
  std::set<std::string> given_;
  std::vector<Found> problems_;
};

// The fixed default of a key, set in `spec`.
void SetDefault(const JobKey& key, v1::JobSpec* spec) {
  const auto tree = ParseYamlTree(key.options->def(), key.path, limits::kJobYamlBytes, limits::kJobYamlDepth);
  if (tree.ok()) SetValue(*tree, key, MutableSectionOf(spec, key));
}

const v1::JobSpec& DefaultSpec() {
  static const v1::JobSpec& spec = *[] {
    auto* made = new v1::JobSpec;
    for (const JobKey& key : JobKeys()) {
      if (!key.options->def().empty()) SetDefault(key, made);
    }
    return made;
  }();
  return spec;
}

// Walks the keys in order: `line(key, indent)` makes each one's line or ""; a section's heading comes before its first.
template <typename MakeLine>
std::string Render(const MakeLine& make_line) {
  std::string text;
  const FieldDescriptor* section = nullptr;
  for (const JobKey& key : JobKeys()) {
    const std::string line = make_line(key, key.section ? "  " : "");
    if (line.empty()) continue;
    if (key.section != section) {
      section = key.section;
      text += section->name() + ":\n";
    }
    text += line;
  }
  return text;
}

}  // namespace

absl::StatusOr<v1::JobSpec> ParseJobYaml(std::string_view text, const JobYamlOptions& options, KeyOrigins* origins) {
  ASSIGN_OR_RETURN(const YamlNode root,
                   ParseYamlTree(text, options.file_name, limits::kJobYamlBytes, limits::kJobYamlDepth));
  JobReader reader(options);
  reader.ReadRoot(root);
  for (const std::string& assignment : options.overrides) reader.Override(assignment);
  return reader.Finish(origins);
}

absl::StatusOr<v1::JobSpec> ReadJobYaml(const std::string& path) { return ReadJobYaml(path, {}, nullptr); }

absl::StatusOr<v1::JobSpec> ReadJobYaml(const std::string& path, JobYamlOptions options, KeyOrigins* origins) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, limits::kJobYamlBytes));
  options.file_name = Printable(path);
  // The real folder, so that ".." in a path leads where the file system would lead.
  char* folder = ::realpath(FolderOf(path).c_str(), nullptr);
  if (folder == nullptr) return ErrnoStatus(errno, "cannot resolve the folder of", path);
  options.base_folder = folder;
  std::free(folder);
  if (!IsUtf8(options.base_folder)) {
    return ErrorOf(v1::REASON_USER_ERROR, "the folder of \"" + Printable(path) +
                                              "\" is not UTF-8, so paths relative to it cannot be sent");
  }
  return ParseJobYaml(text, options, origins);
}

void FillDefaults(v1::JobSpec* spec) {
  v1::JobSpec filled = DefaultSpec();
  // Merging appends to lists and would keep the default's elements before the given ones.
  for (const JobKey& key : JobKeys()) {
    if (key.field->is_repeated() && IsSet(*spec, key)) {
      Message* section = MutableSectionOf(&filled, key);
      section->GetReflection()->ClearField(section, key.field);
    }
  }
  filled.MergeFrom(*spec);
  *spec = std::move(filled);
}

std::string ToJobYaml(const v1::JobSpec& spec) {
  return Render([&](const JobKey& key, const std::string& indent) -> std::string {
    if (!IsSet(spec, key)) return "";
    return indent + key.field->name() + ": " + ValueYaml(spec, key) + "\n";
  });
}

std::string ExplainedJobYaml(const v1::JobSpec& spec, const KeyOrigins& origins) {
  return Render([&](const JobKey& key, const std::string& indent) -> std::string {
    if (!IsSet(spec, key)) return indent + "# " + key.field->name() + ": not set. " + key.options->about() + "\n";
    const std::string value = ValueYaml(spec, key);
    const auto found = origins.find(key.path);
    std::string origin = "derived";
    if (found != origins.end()) origin = found->second;
    else if (IsSet(DefaultSpec(), key) && ValueYaml(DefaultSpec(), key) == value) origin = "default";
    std::string line = indent + key.field->name() + ": " + value;
    line.resize(std::max<size_t>(line.size() + 2, 40), ' ');
    return line + "# " + origin + "\n";
  });
}

std::string ReferenceYaml() {
  // What a required key, or one of two of which one must be given, says in the reference.
  static const std::map<std::string, std::string>& examples = *new std::map<std::string, std::string>{
      {"name", "reference"}, {"data.source", "synthetic"}, {"schedule.epochs", "100"}};
  std::string text =
      "# Every key of job.yaml with its meaning, what it allows and its default. This file is a legal job.\n"
      "# Only name, data.source and one of schedule.epochs and schedule.steps must be given, and data.path unless the\n"
      "# source is synthetic. A key behind '#' has no fixed default. Relative paths start at the job file's folder.\n"
      "# Generated from proto/hierad/v1/job.proto; a test keeps the two equal.\n\n";
  text += Render([&](const JobKey& key, const std::string& indent) -> std::string {
    const v1::Key& o = *key.options;
    std::string lines = indent + "# " + o.about() + "\n";
    const auto example = examples.find(key.path);
    lines += indent + "# " + (o.required() ? "Required: " : "Allowed: ") + KindOf(key) + ".\n";
    if (example != examples.end()) return lines + indent + key.field->name() + ": " + example->second + "\n";
    if (o.def().empty()) return lines + indent + "# " + key.field->name() + ":\n";
    return lines + indent + key.field->name() + ": " + o.def() + "\n";
  });
  return text;
}

}  // namespace hierad
