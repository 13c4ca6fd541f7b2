#include "base/job_keys.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/limits.h"
#include "base/text.h"
#include "base/yaml_tree.h"

namespace hierad {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kPathBytes = 4095;   // PATH_MAX without its NUL

// Words of other programs for keys of ours, where spelling does not lead there.
constexpr std::pair<std::string_view, std::string_view> kOtherWords[] = {
    {"learning_rate", "optimizer.lr"},      {"base_lr", "optimizer.blr"},
    {"base_learning_rate", "optimizer.blr"}, {"peak_lr", "optimizer.lr"},
    {"max_lr", "optimizer.lr"},             {"batch_size", "step.batch_per_rank"},
    {"batch", "step.batch_per_rank"},       {"batchsize", "step.batch_per_rank"},
    {"micro_batch", "step.batch_per_rank"}, {"gradient_accumulation_steps", "step.accumulation"},
    {"accum_iter", "step.accumulation"},    {"grad_accum", "step.accumulation"},
    {"gpus", "resources.ranks"},            {"num_gpus", "resources.ranks"},
    {"world_size", "resources.ranks"},      {"nproc_per_node", "resources.ranks"},
    {"wd", "optimizer.weight_decay"},       {"betas", "optimizer.beta1"},
    {"grad_clip", "optimizer.clip_norm"},   {"clip_grad", "optimizer.clip_norm"},
    {"max_grad_norm", "optimizer.clip_norm"}, {"amp", "step.precision"},
    {"dtype", "step.precision"},            {"bf16", "step.precision"},
    {"fp16", "step.precision"},             {"init_scale", "step.loss_scale"},
    {"growth_interval", "step.loss_scale_growth_steps"}, {"scale_window", "step.loss_scale_growth_steps"},
    {"mixed_precision", "step.precision"},  {"dataset", "data.source"},
    {"data_path", "data.path"},             {"data_dir", "data.path"},
    {"output_dir", "output.folder"},        {"out_dir", "output.folder"},
    {"save_dir", "output.folder"},          {"num_workers", "data.workers"},
    {"iterations", "schedule.steps"},       {"iters", "schedule.steps"},
    {"warmup_epochs", "schedule.warmup_ratio"}, {"warmup_steps", "schedule.warmup_ratio"},
    {"warmup", "schedule.warmup_ratio"},    {"resume", "model.init_from"},
    {"pretrained", "model.init_from"},      {"checkpoint_every", "checkpoint.every_steps"},
    {"save_every", "checkpoint.every_steps"}, {"channels", "model.in_chans"},
    {"in_channels", "model.in_chans"},      {"num_channels", "model.in_chans"},
    {"img_size", "model.input_size"},       {"image_size", "model.input_size"},
    {"depths", "model.stages"},             {"depth", "model.stages"},
    {"norm_pix_loss", "model.norm_target"}, {"drop_path", "model.drop_path_rate"},
    {"random_seed", "seed"},                {"arch", "model.variant"},
    {"architecture", "model.variant"},      {"val_path", "eval.path"},
    {"embedding_dim", "model.embed_dim"},   {"max_retries", "retry.max_attempts"},  {"retries", "retry.max_attempts"}};

struct Interval {
  double low = 0, high = 0;
  bool low_open = false, high_open = false;

  static Interval From(std::string_view text) {
    Interval interval;
    const auto bound = [](std::string_view word) {
      while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
      if (word == "inf") return std::numeric_limits<double>::infinity();
      if (word == "-inf") return -std::numeric_limits<double>::infinity();
      double value = 0;
      std::from_chars(word.data(), word.data() + word.size(), value);
      return value;
    };
    const size_t comma = text.find(',');
    interval.low_open = text.front() == '(';
    interval.high_open = text.back() == ')';
    interval.low = bound(text.substr(1, comma - 1));
    interval.high = bound(text.substr(comma + 1, text.size() - comma - 2));
    return interval;
  }
  // long double holds every 64-bit integer exactly. A NaN is in no interval.
  bool Contains(long double v) const {
    return (low_open ? v > low : v >= low) && (high_open ? v < high : v <= high);
  }
};

template <typename Visit>
void ForEachNumber(const Message& section, const FieldDescriptor* field, const Visit& visit) {
  const auto* r = section.GetReflection();
  const int count = field->is_repeated() ? r->FieldSize(section, field) : 1;
  for (int i = 0; i < count; ++i) {
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32: {
        const auto v = field->is_repeated() ? r->GetRepeatedInt32(section, field, i) : r->GetInt32(section, field);
        visit(i, static_cast<long double>(v), std::to_string(v));
        break;
      }
      case FieldDescriptor::CPPTYPE_INT64: {
        const auto v = field->is_repeated() ? r->GetRepeatedInt64(section, field, i) : r->GetInt64(section, field);
        visit(i, static_cast<long double>(v), std::to_string(v));
        break;
      }
      case FieldDescriptor::CPPTYPE_DOUBLE: {
        const auto v = field->is_repeated() ? r->GetRepeatedDouble(section, field, i) : r->GetDouble(section, field);
        visit(i, static_cast<long double>(v), DoubleText(v));
        break;
      }
      default: break;
    }
  }
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = c == '-' || c == ' ' ? '_' : c >= 'A' && c <= 'Z' ? char(c + 32) : c;
  return lower;
}

std::string_view Leaf(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string_view SectionName(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

std::string NameProblem(const std::string& name) {
  const auto alnum = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); };
  const bool legal = !name.empty() && name.size() <= size_t(limits::kJobNameBytes) && alnum(name[0]) &&
                     std::all_of(name.begin(), name.end(), [&](char c) {
                       return alnum(c) || c == '.' || c == '_' || c == '-';
                     }) && name.find("..") == std::string::npos;
  if (legal) return "";
  return "\"" + Printable(name, 80) + "\" is not a legal name; letters, digits, '.', '_' and '-' are allowed, at most " +
         std::to_string(limits::kJobNameBytes) + " of them, the first a letter or digit, no '..'";
}

std::string PathProblem(const std::string& path, bool absolute) {
  if (path.empty()) return "the path is empty; leave the key out for its default";
  if (path.size() > kPathBytes) return "the path has " + std::to_string(path.size()) + " bytes; at most 4095 are allowed";
  if (path[0] == '~') return "\"" + Printable(path) + "\": '~' is not expanded; write the folder out";
  if (!absolute) return "";
  if (path[0] != '/') return "\"" + Printable(path) + "\" is not an absolute path";
  for (const std::string& part : Split(path, '/')) {
    if (part == "..") return "\"" + Printable(path) + "\" has \"..\" in it; write the path without";
  }
  return "";
}

std::string TextProblem(const JobKey& key, const std::string& text, bool absolute) {
  if (key.path == "name") return NameProblem(text);
  for (size_t at = 0; at < text.size();) {
    const Rune rune = FirstRune(std::string_view(text).substr(at));
    if (rune.code == 0xFFFFFFFF) return "\"" + Printable(text, 80) + "\" is not UTF-8";
    if (rune.code < 0x20 || rune.code == 0x7F) {
      return "\"" + Printable(text, 80) + "\" has a control character in it";
    }
    at += rune.bytes;
  }
  if (key.options->path()) return PathProblem(text, absolute);
  if (key.options->words().empty()) return "";
  const std::vector<std::string> words = Split(key.options->words(), '|');
  if (std::find(words.begin(), words.end(), text) != words.end()) return "";
  std::string problem = "\"" + Printable(text, 80) + "\" is not " + KindOf(key);
  for (const std::string& word : words) {
    if (EditDistance(Lower(text), word) <= 1 + int(word.size()) / 4 && words.size() > 1) {
      return problem + "; did you mean " + word + "?";
    }
  }
  return problem;
}

std::string TypeName(const FieldDescriptor* field, bool plural) {
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL: return plural ? "true or false" : "true or false";
    case FieldDescriptor::CPPTYPE_DOUBLE: return plural ? "numbers" : "a number";
    case FieldDescriptor::CPPTYPE_STRING: return plural ? "texts" : "text";
    case FieldDescriptor::CPPTYPE_UINT64: return "an integer in [0, 18446744073709551615]";
    default: return plural ? "integers" : "an integer";
  }
}

// A distance between what was written and a key; 100 and more: not near. In tenths, so that ties break by place.
int Distance(std::string_view written, const std::string& known) {
  const std::string path = Lower(written);
  const std::string_view leaf = Leaf(path), known_leaf = Leaf(known);
  const int whole = EditDistance(path, known);
  int best = whole <= int(known.size() + 2) / 4 ? whole * 10 : 1000;
  const int leaf_distance = EditDistance(leaf, known_leaf);
  if (leaf_distance <= int(known_leaf.size() + 2) / 4) {
    best = std::min(best, leaf_distance * 10 + (SectionName(path) == SectionName(known) ? 0 : 5));
  }
  // "num_epochs", "total_steps", "adam_beta1": the key with a word before it.
  const std::string tail = "_" + std::string(known_leaf);
  if (known_leaf.size() >= 3 && leaf.size() > tail.size() &&
      leaf.substr(leaf.size() - tail.size()) == tail) {
    best = std::min(best, 22 + (SectionName(path) == SectionName(known) ? 0 : 5));
  }
  return best;
}

}  // namespace

const std::vector<JobKey>& JobKeys() {
  static const std::vector<JobKey>& keys = *[] {
    auto* list = new std::vector<JobKey>;
    const auto add = [&](const FieldDescriptor* section, const FieldDescriptor* field) {
      std::string path = section ? section->name() + "." + field->name() : field->name();
      list->push_back({std::move(path), section, field, &field->options().GetExtension(v1::key)});
    };
    const auto* job = v1::JobSpec::descriptor();
    for (int i = 0; i < job->field_count(); ++i) {
      const FieldDescriptor* field = job->field(i);
      if (field->message_type() == nullptr) add(nullptr, field);
      else for (int k = 0; k < field->message_type()->field_count(); ++k) add(field, field->message_type()->field(k));
    }
    return list;
  }();
  return keys;
}

const JobKey* FindJobKey(std::string_view path) {
  for (const JobKey& key : JobKeys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

const FieldDescriptor* FindJobSection(std::string_view name) {
  const FieldDescriptor* field = v1::JobSpec::descriptor()->FindFieldByName(std::string(name));
  return field && field->message_type() ? field : nullptr;
}

std::string NearestJobKey(std::string_view path) {
  const std::string leaf = Lower(Leaf(path));
  for (const JobKey& key : JobKeys()) {
    if (key.path == Lower(path)) return key.path;
  }
  for (const auto& [word, key] : kOtherWords) {
    if (word == leaf) return std::string(key);
  }
  int best = 1000;
  std::string nearest;
  const auto consider = [&](const std::string& known) {
    const int distance = Distance(path, known);
    if (distance < best) {
      best = distance;
      nearest = known;
    }
  };
  for (const JobKey& key : JobKeys()) consider(key.path);
  const auto* job = v1::JobSpec::descriptor();
  for (int i = 0; i < job->field_count(); ++i) {
    if (job->field(i)->message_type() != nullptr) consider(job->field(i)->name());
  }
  return nearest;
}

const Message* SectionOf(const v1::JobSpec& spec, const JobKey& key) {
  if (!key.section) return &spec;
  const auto* r = spec.GetReflection();
  return r->HasField(spec, key.section) ? &r->GetMessage(spec, key.section) : nullptr;
}

Message* MutableSectionOf(v1::JobSpec* spec, const JobKey& key) {
  return key.section ? spec->GetReflection()->MutableMessage(spec, key.section) : spec;
}

bool IsSet(const v1::JobSpec& spec, const JobKey& key) {
  const Message* section = SectionOf(spec, key);
  if (!section) return false;
  const auto* r = section->GetReflection();
  return key.field->is_repeated() ? r->FieldSize(*section, key.field) > 0 : r->HasField(*section, key.field);
}

std::string KindOf(const JobKey& key) {
  const v1::Key& o = *key.options;
  std::string range = o.range().empty() ? "" : " in " + o.range();
  if (key.field->is_repeated()) {
    std::string count;
    if (!o.length().empty()) {
      const Interval length = Interval::From(o.length());
      count = length.low == length.high
                  ? std::to_string(int(length.low)) + " "
                  : std::to_string(int(length.low)) + " to " + std::to_string(int(length.high)) + " ";
    }
    return "a list of " + count + TypeName(key.field, true) + range;
  }
  if (!o.words().empty()) {
    std::string words = "one of ";
    if (o.words().find('|') == std::string::npos) return "the only choice, " + o.words();
    for (const char c : o.words()) words += c == '|' ? std::string(", ") : std::string(1, c);
    return words;
  }
  if (o.path()) return "a path";
  return TypeName(key.field, false) + range;
}

std::optional<std::string> ValueProblem(const v1::JobSpec& spec, const JobKey& key, bool absolute) {
  const Message& section = *SectionOf(spec, key);
  const auto* r = section.GetReflection();
  if (key.field->is_repeated() && !key.options->length().empty()) {
    const int size = r->FieldSize(section, key.field);
    if (!Interval::From(key.options->length()).Contains(size)) {
      return std::to_string(size) + " elements were given; allowed is " + KindOf(key);
    }
  }
  if (key.field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    if (!key.field->is_repeated()) {
      std::string problem = TextProblem(key, r->GetString(section, key.field), absolute);
      return problem.empty() ? std::nullopt : std::optional(std::move(problem));
    }
    for (int i = 0; i < r->FieldSize(section, key.field); ++i) {
      const std::string text = r->GetRepeatedString(section, key.field, i);
      const std::string problem = text.empty() ? "is empty text" : TextProblem(key, text, absolute);
      if (!problem.empty()) return problem + " (element " + std::to_string(i + 1) + ")";
    }
  }
  if (key.options->range().empty()) return std::nullopt;
  const Interval range = Interval::From(key.options->range());
  std::optional<std::string> problem;
  ForEachNumber(section, key.field, [&](int i, long double value, const std::string& text) {
    if (problem || range.Contains(value)) return;
    problem = text + (key.field->is_repeated() ? " (element " + std::to_string(i + 1) + ")" : "") +
              " is not allowed; it must be in " + key.options->range();
  });
  return problem;
}

std::string DoubleText(double value) {
  if (std::isnan(value)) return ".nan";
  if (std::isinf(value)) return value > 0 ? ".inf" : "-.inf";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value);
  std::string text(buffer, end.ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string ValueYaml(const v1::JobSpec& spec, const JobKey& key) {
  const Message& section = *SectionOf(spec, key);
  const auto* r = section.GetReflection();
  const FieldDescriptor* f = key.field;
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      if (!f->is_repeated()) return YamlQuoted(r->GetString(section, f));
      break;
    case FieldDescriptor::CPPTYPE_UINT64: return std::to_string(r->GetUInt64(section, f));
    default: break;
  }
  std::string text;
  const auto add = [&](const std::string& value) { text += (text.empty() ? "" : ", ") + value; };
  if (f->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    for (int i = 0; i < r->FieldSize(section, f); ++i) add(YamlQuoted(r->GetRepeatedString(section, f, i)));
  }
  if (f->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
    const int count = f->is_repeated() ? r->FieldSize(section, f) : 1;
    for (int i = 0; i < count; ++i) {
      add((f->is_repeated() ? r->GetRepeatedBool(section, f, i) : r->GetBool(section, f)) ? "true" : "false");
    }
  } else {
    ForEachNumber(section, f, [&](int, long double, const std::string& value) { add(value); });
  }
  return f->is_repeated() ? "[" + text + "]" : text;
}

}  // namespace hierad
