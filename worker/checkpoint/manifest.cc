#include "worker/checkpoint/manifest.h"

#include <cmath>
#include <cstdio>
#include <google/protobuf/util/json_util.h>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status.h"

namespace hierad {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;
constexpr char kSelf[] = "sha256_of_the_rest";   // of the compact dump without this key

json Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

double NumberOf(const json& value) {
  if (!value.is_string()) return value.get<double>();
  const auto text = value.get<std::string>();
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::numeric_limits<double>::quiet_NaN();
}

absl::Status CheckFormat(const json& value) {
  if (const int format = value.at("format").get<int>(); format != kFormat) {
    return absl::FailedPreconditionError(absl::StrCat("its format is ", format, ", this hiera-worker reads ", kFormat,
                                                      "; use the version that wrote it"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string Manifest::ToText() const {
  json out = {{"format", kFormat}, {"step", step}, {"created_ms", created_ms}, {"files", json::object()}};
  if (eval_loss) out["eval_loss"] = Number(*eval_loss);
  for (const auto& [name, file] : files) out["files"][name] = {{"bytes", file.bytes}, {"sha256", file.sha256}};
  out[kSelf] = Sha256Hex(out.dump());
  return out.dump(1) + "\n";
}

absl::StatusOr<Manifest> Manifest::FromText(const std::string& text) {
  try {
    json in = json::parse(text);
    const auto self = in.at(kSelf).get<std::string>();
    in.erase(kSelf);
    if (Sha256Hex(in.dump()) != self) return absl::DataLossError("manifest.json is damaged: it differs from its own SHA-256");
    RETURN_IF_ERROR(CheckFormat(in));
    Manifest manifest;
    manifest.step = in.at("step").get<int64_t>();
    manifest.created_ms = in.at("created_ms").get<int64_t>();
    if (in.contains("eval_loss")) manifest.eval_loss = NumberOf(in["eval_loss"]);
    for (const auto& [name, file] : in.at("files").items()) {
      manifest.files[name] = {file.at("bytes").get<int64_t>(), file.at("sha256").get<std::string>()};
    }
    for (const char* name : {kModelFile, kOptimizerFile, kStateFile}) {
      if (manifest.files.count(name) == 0) return absl::DataLossError(absl::StrCat("manifest.json does not name ", name));
    }
    return manifest;
  } catch (const json::exception&) {
    return absl::DataLossError("manifest.json is not one that hiera-worker wrote");
  }
}

std::string StateToText(const CheckpointContents& contents, const v1::JobSpec& spec) {
  json out = {{"format", kFormat},
              {"step", contents.state.step},
              {"updates", contents.state.updates},
              {"nan_steps_in_row", contents.state.nan_steps_in_row},
              {"seed", spec.seed()},
              {"statistics", {{"mean", json::array()}, {"std", json::array()}}}};
  for (double v : contents.statistics.mean) out["statistics"]["mean"].push_back(Number(v));
  for (double v : contents.statistics.std) out["statistics"]["std"].push_back(Number(v));
  if (const LossScale& scale = contents.state.loss_scale; scale.value > 0) {
    out["loss_scale"] = {{"value", scale.value}, {"good_steps", scale.good_steps}};
  }
  if (contents.eval_loss) out["eval_loss"] = Number(*contents.eval_loss);
  if (contents.has_best) out["best_eval_loss"] = Number(contents.best_eval_loss);
  if (!contents.algorithms.empty()) out["algorithms"] = contents.algorithms;
  std::string job;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  if (google::protobuf::util::MessageToJsonString(spec, &job, options).ok()) out["job"] = json::parse(job, nullptr, false);
  return out.dump(1) + "\n";
}

absl::StatusOr<v1::JobSpec> JobFromStateText(const std::string& text) {
  const json in = json::parse(text, nullptr, false);
  v1::JobSpec spec;
  if (!in.is_object() || !in.contains("job") ||
      !google::protobuf::util::JsonStringToMessage(in["job"].dump(-1, ' ', false, json::error_handler_t::replace), &spec).ok()) {
    return absl::DataLossError("state.json holds no job that this hiera-worker can read");
  }
  return spec;
}

absl::StatusOr<CheckpointContents> StateFromText(const std::string& text) {
  try {
    const json in = json::parse(text);
    RETURN_IF_ERROR(CheckFormat(in));
    CheckpointContents contents;
    contents.state.step = in.at("step").get<int64_t>();
    contents.state.updates = in.at("updates").get<int64_t>();
    contents.state.nan_steps_in_row = in.at("nan_steps_in_row").get<int64_t>();
    if (in.contains("loss_scale")) {
      contents.state.loss_scale = {in["loss_scale"].at("value").get<double>(), in["loss_scale"].at("good_steps").get<int64_t>()};
    }
    for (const json& v : in.at("statistics").at("mean")) contents.statistics.mean.push_back(NumberOf(v));
    for (const json& v : in.at("statistics").at("std")) contents.statistics.std.push_back(NumberOf(v));
    if (in.contains("eval_loss")) contents.eval_loss = NumberOf(in["eval_loss"]);
    if (in.contains("best_eval_loss")) {
      contents.has_best = true;
      contents.best_eval_loss = NumberOf(in["best_eval_loss"]);
    }
    if (in.contains("algorithms")) contents.algorithms = in["algorithms"].get<std::string>();
    return contents;
  } catch (const json::exception&) {
    return absl::DataLossError("state.json is not one that hiera-worker wrote");
  }
}

std::string CheckpointName(int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "step-%09lld", static_cast<long long>(step));
  return name;
}

int64_t StepOfName(const std::string& name) {
  constexpr size_t kPrefix = 5;
  if (name.rfind("step-", 0) != 0 || name.size() < kPrefix + 9 || name.size() > kPrefix + 18) return -1;
  int64_t step = 0;
  for (size_t i = kPrefix; i < name.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return -1;
    step = step * 10 + (name[i] - '0');
  }
  return CheckpointName(step) == name ? step : -1;
}

}  // namespace hierad
