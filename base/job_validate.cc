#include "base/job_validate.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <set>

#include "base/fs.h"
#include "base/job_keys.h"
#include "base/limits.h"
#include "base/plan/geometry.h"
#include "base/status.h"

namespace hierad {
namespace {

using google::protobuf::Message;

std::string Number(double value) { return DoubleText(value); }

// Saturates: factors come from an untrusted client.
int64_t Times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

class Validator {
 public:
  explicit Validator(const v1::JobSpec& spec) : spec_(spec) {}

  std::vector<std::string> Run() {
    CheckUnknownFields();
    CheckKeys();
    // Rules between keys read values that are legal one by one.
    if (Legal("model.")) CheckModel();
    if (Legal("data.") && Legal("model.")) CheckData();
    if (Legal("data.") && Legal("eval.")) CheckEval();
    if (Legal("schedule.") && Legal("optimizer.")) CheckSchedule();
    if (Legal("step.") && Legal("resources.")) CheckStep();
    return std::move(problems_);
  }

 private:
  void Problem(const std::string& path, const std::string& problem) {
    problems_.push_back(path + ": " + problem);
    illegal_.insert(path);
  }

  bool Legal(const std::string& prefix) const {
    const auto at = illegal_.lower_bound(prefix);
    return at == illegal_.end() || at->compare(0, prefix.size(), prefix) != 0;
  }

  // Dropping what we do not know would run another job than the one submitted.
  void CheckUnknownFields() {
    const auto check = [&](const Message& message, const std::string& path) {
      const auto& unknown = message.GetReflection()->GetUnknownFields(message);
      if (unknown.field_count() > 0) {
        Problem(path, "has key number " + std::to_string(unknown.field(0).number()) +
                          ", which this version does not know; it was sent by a newer hierctl");
      }
    };
    check(spec_, "job");
    const auto* r = spec_.GetReflection();
    const auto* d = spec_.GetDescriptor();
    for (int i = 0; i < d->field_count(); ++i) {
      if (d->field(i)->message_type() && r->HasField(spec_, d->field(i))) {
        check(r->GetMessage(spec_, d->field(i)), d->field(i)->name());
      }
    }
  }

  void CheckKeys() {
    for (const JobKey& key : JobKeys()) {
      if (IsSet(spec_, key)) {
        if (const auto problem = ValueProblem(spec_, key, true)) Problem(key.path, *problem);
      } else if (key.options->required()) {
        Problem(key.path, "is missing; give " + KindOf(key));
      }
    }
  }

  void CheckModel() {
    int64_t elements = spec_.model().in_chans();
    for (const int size : spec_.model().input_size()) elements = Times(elements, size);
    if (elements > limits::kSampleElements) {
      return Problem("model.input_size", std::to_string(elements) + " numbers in one sample (in_chans x input_size); at most " +
                                             std::to_string(limits::kSampleElements) + " are allowed");
    }
    if (auto geometry = Geometry::From(spec_.model()); !geometry.ok()) {
      problems_.emplace_back(geometry.status().message());
      illegal_.insert("model.");
    }
  }

  void CheckData() {
    const v1::DataSpec& data = spec_.data();
    const int dims = spec_.model().input_size_size();
    const std::string axes = std::to_string(dims) + " axes";
    if (data.source() == "synthetic") {
      if (data.has_path()) Problem("data.path", "source synthetic reads no file; take path out, or name its source");
      CheckSyntheticLength();
    } else if (!data.has_path()) {
      Problem("data.path", "is missing; source " + data.source() + " needs the file or folder to train on");
    }
    if (data.source() == "images" && dims != 2) {
      Problem("data.source", "images needs an input_size of 2 axes, [H, W]; model.input_size has " + axes);
    }
    if ((data.source() == "ts" || data.source() == "edf") && dims != 1 && !data.raw_reshape()) {
      Problem("data.source", data.source() + " needs an input_size of 1 axis, [T], or data.raw_reshape: true; model.input_size has " + axes);
    }
    CheckPerChannel("data.mean", data.mean_size());
    CheckPerChannel("data.std", data.std_size());
    if (data.crop_scale_size() == 2 && data.crop_scale(0) > data.crop_scale(1)) {
      Problem("data.crop_scale", "[" + Number(data.crop_scale(0)) + ", " + Number(data.crop_scale(1)) +
                                     "]: the least comes first");
    }
    if (data.crop_ratio_size() == 2 && data.crop_ratio(0) > data.crop_ratio(1)) {
      Problem("data.crop_ratio", "[" + Number(data.crop_ratio(0)) + ", " + Number(data.crop_ratio(1)) +
                                     "]: the least comes first");
    }
    CheckSignalKeys();
    CheckRecordingKeys();
    if (dims == 1 || data.raw_reshape()) return;
    const std::string only = " is for signals (an input_size of 1 axis, or data.raw_reshape); model.input_size has " + axes;
    if (data.mean_pool() > 1) Problem("data.mean_pool", std::to_string(data.mean_pool()) + only);
    if (data.has_pad() && data.pad() != "none") Problem("data.pad", data.pad() + only);
    if (data.has_normalize() && data.normalize() != "none") Problem("data.normalize", data.normalize() + only);
    if (data.has_crop() && data.crop() != "none") Problem("data.crop", data.crop() + only);
    if (data.shift() > 0) Problem("data.shift", std::to_string(data.shift()) + only);
  }

  void CheckSignalKeys() {
    const v1::DataSpec& data = spec_.data();
    const std::string& source = data.source();
    if (source == "images" || source == "synthetic") {
      const std::string only = "is for signals (ts, npy, edf); the source is " + source;
      if (data.raw_reshape()) Problem("data.raw_reshape", only);
      if (data.has_crop() && data.crop() != "none") Problem("data.crop", only);
      if (data.has_missing() && data.missing() != "refuse") Problem("data.missing", only);
      if (data.has_clip()) Problem("data.clip", only);
      if (data.has_scale()) Problem("data.scale", only);
      if (data.shift() > 0) Problem("data.shift", only);
      if (data.channel_drop() > 0) Problem("data.channel_drop", only);
      if (data.amplitude_size() > 0) Problem("data.amplitude", only);
    }
    if (source != "ts" && data.has_unequal() && data.unequal() != "refuse") Problem("data.unequal", "is for source ts; the source is " + source);
    if (data.raw_reshape() && spec_.model().input_size_size() == 1) {
      Problem("data.raw_reshape", "true needs an input_size of 2 or 3 axes; a signal of 1 axis needs no reshaping");
    }
    if (data.has_scale() && data.has_normalize() && data.normalize() != "none") {
      Problem("data.scale", "and data.normalize are both given; keep one");
    }
    if (data.amplitude_size() == 2 && data.amplitude(0) > data.amplitude(1)) {
      Problem("data.amplitude", "[" + Number(data.amplitude(0)) + ", " + Number(data.amplitude(1)) + "]: the least comes first");
    }
  }

  void CheckRecordingKeys() {
    const v1::DataSpec& data = spec_.data();
    if (data.source() != "edf") {
      const std::string only = "is for source edf; the source is " + data.source();
      if (data.channels_size() > 0) Problem("data.channels", only);
      if (data.has_unit() && data.unit() != "uV") Problem("data.unit", only);
      if (data.has_sample_rate()) Problem("data.sample_rate", only);
      if (data.band_pass_size() > 0) Problem("data.band_pass", only);
      if (data.notch_size() > 0) Problem("data.notch", only);
      if (data.has_window_s()) Problem("data.window_s", only);
      if (data.has_stride_s()) Problem("data.stride_s", only);
      if (data.labels_size() > 0) Problem("data.labels", only);
      if (data.held_out() > 0) Problem("data.held_out", only);
      if (data.has_subject() && data.subject() != "file") Problem("data.subject", only);
      return;
    }
    if (data.channels_size() > 0 && data.channels_size() != spec_.model().in_chans()) {
      Problem("data.channels", std::to_string(data.channels_size()) + " names were given; model.in_chans is " +
                                   std::to_string(spec_.model().in_chans()) + ", so give that many");
    }
    if (data.band_pass_size() == 2 && data.band_pass(1) > 0 && data.band_pass(0) >= data.band_pass(1)) {
      Problem("data.band_pass", "[" + Number(data.band_pass(0)) + ", " + Number(data.band_pass(1)) + "]: the lower edge comes first");
    }
    if (const std::set<std::string> distinct(data.labels().begin(), data.labels().end()); int(distinct.size()) != data.labels_size()) {
      Problem("data.labels", "a class is given twice; keep one");
    }
  }

  void CheckPerChannel(const std::string& path, int size) {
    if (size == 0) return;
    if (spec_.data().source() != "images") {
      Problem(path, "is for source images; the source is " + spec_.data().source());
    } else if (size != spec_.model().in_chans()) {
      Problem(path, std::to_string(size) + " values were given; model.in_chans is " +
                        std::to_string(spec_.model().in_chans()) + ", so give that many");
    }
  }

  void CheckSyntheticLength() {
    const v1::DataSpec& data = spec_.data();
    if (data.last_batch() != "drop" || !Legal("step.") || !Legal("resources.")) return;
    const int64_t visits = Times(data.synthetic_samples(), std::max(data.repeat(), 1));
    if (visits >= EffectiveBatch(spec_)) return;
    Problem("data.last_batch", "drop leaves 0 steps an epoch: " + std::to_string(visits) +
                                   " samples are fewer than the effective batch of " +
                                   std::to_string(EffectiveBatch(spec_)) + "; use pad, or a smaller batch");
  }

  void CheckEval() {
    if (spec_.eval().has_path() && spec_.data().source() == "synthetic") {
      Problem("eval.path", "source synthetic has no held-out data; take path out");
    }
    if (spec_.eval().has_path() && spec_.data().held_out() > 0) {
      Problem("data.held_out", "and eval.path are both given; keep one");
    }
  }

  void CheckSchedule() {
    const v1::ScheduleSpec& schedule = spec_.schedule();
    if (schedule.has_epochs() == schedule.has_steps()) {
      Problem("schedule.epochs", schedule.has_epochs() ? "and schedule.steps are both given; keep one"
                                                       : "or schedule.steps must be given: the length of the run");
    }
    if (schedule.decay() == "cosine" && Legal("step.") && Legal("resources.") && schedule.min_lr() > PeakLr(spec_)) {
      Problem("schedule.min_lr", Number(schedule.min_lr()) + " is above the peak rate, " + Number(PeakLr(spec_)));
    }
  }

  void CheckStep() {
    if (EffectiveBatch(spec_) > limits::kEffectiveBatch) {
      Problem("step.batch_per_rank", std::to_string(spec_.step().batch_per_rank()) + " x " +
                                         std::to_string(spec_.resources().ranks()) + " ranks x accumulation " +
                                         std::to_string(spec_.step().accumulation()) +
                                         " is an effective batch above " + std::to_string(limits::kEffectiveBatch) +
                                         ", the most allowed");
    }
    const std::string& backend = spec_.step().sdpa_backend();
    if (!UsesGpu(spec_) && (backend == "cudnn" || backend == "mem_efficient")) {
      Problem("step.sdpa_backend", backend + " needs a GPU; resources.device is cpu; use auto or math");
    }
    CheckFusedOnly();
    CheckLossScale();
    if (spec_.step().tf32() && !UsesGpu(spec_)) {
      Problem("step.tf32", "true needs a GPU; resources.device is cpu; set it to false");
    }
  }

  void CheckLossScale() {
    const v1::StepSpec& step = spec_.step();
    if (step.precision() == "fp16") return;
    const std::string only = " is for step.precision fp16; the precision is " + (step.precision().empty() ? std::string("fp32") : step.precision());
    for (const char* path : {"step.loss_scale", "step.loss_scale_growth_steps"}) {
      const JobKey* key = FindJobKey(path);
      if (IsSet(spec_, *key) && ValueYaml(spec_, *key) != key->options->def()) Problem(path, ValueYaml(spec_, *key) + only);
    }
  }

  // Of the planned step alone.
  void CheckFusedOnly() {
    const v1::StepSpec& step = spec_.step();
    const auto geometry = Legal("model.") ? Geometry::From(spec_.model()) : absl::StatusOr<Geometry>(absl::UnknownError(""));
    for (const int stage : step.checkpoint_stages()) {
      if (!geometry.ok() || stage <= geometry->spec.stages_size()) continue;
      Problem("step.checkpoint_stages", std::to_string(stage) + "; the model has stages 1 to " + std::to_string(geometry->spec.stages_size()));
    }
    if (step.shard_optimizer() && spec_.optimizer().name() == "muon") {
      Problem("step.shard_optimizer", "true is for optimizer.name adamw; muon's matrices are not cut: it shares out their products among the ranks by itself");
    }
    const std::string mode = ResolvedMode(step, UsesGpu(spec_));
    if (mode == "fused") return;
    const std::string only = " is for step.mode fused; the mode is " + mode + (step.mode().empty() || step.mode() == "auto" ? ", to which auto comes here" : "");
    if (step.reduce_dtype() == "bf16") Problem("step.reduce_dtype", "bf16" + only);
    if (step.checkpoint_stages_size() > 0) Problem("step.checkpoint_stages", "it" + only);
    if (step.checkpoint_decoder()) Problem("step.checkpoint_decoder", "true" + only);
    if (step.shard_optimizer()) Problem("step.shard_optimizer", "true" + only);
  }

  const v1::JobSpec& spec_;
  std::vector<std::string> problems_;
  std::set<std::string> illegal_;
};

}  // namespace

std::vector<std::string> ValidateJob(const v1::JobSpec& spec) { return Validator(spec).Run(); }

absl::Status CheckJob(const v1::JobSpec& spec) {
  const std::vector<std::string> problems = ValidateJob(spec);
  if (problems.empty()) return absl::OkStatus();
  std::string message;
  for (const std::string& problem : problems) message += (message.empty() ? "" : "\n") + problem;
  return ErrorOf(v1::REASON_USER_ERROR, message);
}

int64_t EffectiveBatch(const v1::JobSpec& spec) {
  return Times(Times(spec.step().batch_per_rank(), spec.resources().ranks()), spec.step().accumulation());
}

std::string ResolvedMode(const v1::StepSpec& step, bool gpu) {
  if (!step.mode().empty() && step.mode() != "auto") return step.mode();
  if (!gpu) return "optimized";
  const bool any_attention = step.sdpa_backend().empty() || step.sdpa_backend() == "auto";
  return any_attention && !step.tf32() ? "fused" : "graph_safe";
}

bool UsesGpu(const v1::JobSpec& spec, bool there_is_one) {
  const std::string& device = spec.resources().device();
  return device == "cuda" || (device != "cpu" && there_is_one);
}

double PeakLr(const v1::JobSpec& spec) {
  if (spec.optimizer().has_lr()) return spec.optimizer().lr();
  return spec.optimizer().blr() * double(EffectiveBatch(spec)) / 256.0;
}

}  // namespace hierad
