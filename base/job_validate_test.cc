#include "base/job_validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/job_yaml.h"
#include "base/status.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

v1::JobSpec Job(std::vector<std::string> overrides = {}) {
  JobYamlOptions options;
  options.overrides = std::move(overrides);
  options.override_folder = "/data";
  auto spec = ParseJobYaml("name: a\ndata: {source: synthetic}\nschedule: {epochs: 1}\n", options);
  EXPECT_TRUE(spec.ok()) << spec.status();
  FillDefaults(&*spec);
  return *spec;
}

std::vector<std::string> Problems(std::vector<std::string> overrides) { return ValidateJob(Job(std::move(overrides))); }

v1::JobSpec Eeg() {
  return Job({"data.source=ts", "data.path=x.ts", "model.input_size=[224]", "model.in_chans=6", "data.mean_pool=4",
              "model.stages=[1,1,2]", "model.patch_kernel=[4]", "model.patch_padding=[0]"});
}

TEST(JobValidate, LegalJobs) {
  EXPECT_THAT(ValidateJob(Job()), ElementsAre());
  EXPECT_THAT(ValidateJob(Eeg()), ElementsAre());
  EXPECT_THAT(Problems({"data.source=images", "data.path=p", "model.variant=tiny"}), ElementsAre());
  EXPECT_TRUE(CheckJob(Job()).ok());
}

TEST(JobValidate, CheckJobIsAUserErrorWithEveryProblem) {
  const absl::Status status = CheckJob(Job({"schedule.epochs=null", "data.path=x"}));
  EXPECT_EQ(ReasonOf(status), v1::REASON_USER_ERROR);
  EXPECT_THAT(std::string(status.message()), HasSubstr("data.path: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("\nschedule.epochs: "));
}

TEST(JobValidate, EpochsOrStepsNotBoth) {
  EXPECT_THAT(Problems({"schedule.steps=5"}), ElementsAre(HasSubstr("schedule.epochs: and schedule.steps are both given")));
  EXPECT_THAT(Problems({"schedule.epochs=null"}), ElementsAre(HasSubstr("or schedule.steps must be given")));
  EXPECT_THAT(Problems({"schedule.epochs=null", "schedule.steps=5"}), ElementsAre());
}

TEST(JobValidate, PathAndSourceGoTogether) {
  EXPECT_THAT(Problems({"data.path=x"}), ElementsAre(HasSubstr("data.path: source synthetic reads no file")));
  EXPECT_THAT(Problems({"data.source=npy"}), ElementsAre(HasSubstr("data.path: is missing; source npy needs")));
  EXPECT_THAT(Problems({"eval.path=x"}), ElementsAre(HasSubstr("eval.path: ")));
}

TEST(JobValidate, SourceAndAxesGoTogether) {
  EXPECT_THAT(Problems({"data.source=ts", "data.path=x"}), ElementsAre(HasSubstr("data.source: ts needs an input_size of 1 axis")));
  v1::JobSpec eeg = Eeg();
  eeg.mutable_data()->set_source("images");
  eeg.mutable_data()->set_mean_pool(1);
  EXPECT_THAT(ValidateJob(eeg), ElementsAre(HasSubstr("data.source: images needs an input_size of 2 axes")));
  EXPECT_THAT(Problems({"data.mean_pool=2", "data.pad=zero", "data.normalize=window"}),
              ElementsAre(HasSubstr("data.mean_pool: 2 is for signals"), HasSubstr("data.pad: "), HasSubstr("data.normalize: ")));
}

TEST(JobValidate, KeysOfRecordings) {
  const std::vector<std::string> edf = {"data.source=edf", "data.path=x", "model.input_size=[512]", "model.in_chans=2", "data.channels=[Fp1, T7|T3]"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), edf.begin(), edf.end());
    return Problems(std::move(more));
  };
  EXPECT_THAT(with({"data.band_pass=[0.5, 0]", "data.notch=[50]", "data.labels=[a, b]", "data.held_out=0.2"}), ElementsAre());
  EXPECT_THAT(with({"model.in_chans=3"}), ElementsAre(HasSubstr("data.channels: 2 names were given; model.in_chans is 3")));
  EXPECT_THAT(with({"data.band_pass=[40, 1]"}), ElementsAre(HasSubstr("data.band_pass: [40.0, 1.0]")));
  EXPECT_THAT(with({"data.labels=[a, a]"}), ElementsAre(HasSubstr("data.labels: ")));
  EXPECT_THAT(with({"data.held_out=0.2", "eval.path=y"}), ElementsAre(HasSubstr("data.held_out: and eval.path")));
  EXPECT_THAT(with({"data.scale=100", "data.normalize=window"}), ElementsAre(HasSubstr("data.scale: and data.normalize")));
  EXPECT_THAT(Problems({"data.source=npy", "data.path=x", "data.channels=[a]", "data.sample_rate=100", "data.held_out=0.1"}),
              ElementsAre(HasSubstr("data.channels: is for source edf"), HasSubstr("data.sample_rate: "), HasSubstr("data.held_out: ")));
}

TEST(JobValidate, RawReshapeIsExplicit) {
  const std::vector<std::string> image = {"data.source=ts", "data.path=x", "model.variant=tiny"};
  EXPECT_THAT(Problems(image), ElementsAre(HasSubstr("data.source: ts needs an input_size of 1 axis, [T], or data.raw_reshape")));
  std::vector<std::string> reshaped = image;
  reshaped.insert(reshaped.end(), {"data.raw_reshape=true", "data.mean_pool=2", "data.pad=zero", "data.crop=center"});
  EXPECT_THAT(Problems(reshaped), ElementsAre());
  v1::JobSpec eeg = Eeg();
  eeg.mutable_data()->set_raw_reshape(true);
  EXPECT_THAT(ValidateJob(eeg), ElementsAre(HasSubstr("data.raw_reshape: true needs an input_size of 2 or 3 axes")));
  EXPECT_THAT(Problems({"data.raw_reshape=true", "data.shift=3"}), ElementsAre(HasSubstr("data.raw_reshape: is for signals"), HasSubstr("data.shift: ")));
}

TEST(JobValidate, PerChannelStatistics) {
  EXPECT_THAT(Problems({"data.source=images", "data.path=x", "data.mean=[0.5]", "data.std=[1, 1, 1]"}),
              ElementsAre(HasSubstr("data.mean: 1 values were given; model.in_chans is 3")));
  EXPECT_THAT(Problems({"data.mean=[0.5, 0.5, 0.5]"}), ElementsAre(HasSubstr("data.mean: is for source images")));
}

TEST(JobValidate, LeastComesFirst) {
  EXPECT_THAT(Problems({"data.crop_scale=[1, 0.2]", "data.crop_ratio=[2, 1]"}),
              ElementsAre(HasSubstr("data.crop_scale: [1.0, 0.2]"), HasSubstr("data.crop_ratio: ")));
  EXPECT_THAT(Problems({"data.crop_scale=[0.5, 0.5]"}), ElementsAre());
}

TEST(JobValidate, ZeroStepsAreRefusedWithTheNumbers) {
  EXPECT_THAT(Problems({"data.synthetic_samples=10", "step.batch_per_rank=128", "data.last_batch=drop"}),
              ElementsAre(HasSubstr("10 samples are fewer than the effective batch of 128")));
  EXPECT_THAT(Problems({"data.synthetic_samples=10", "step.batch_per_rank=128"}), ElementsAre());
  EXPECT_THAT(Problems({"data.synthetic_samples=10", "step.batch_per_rank=128", "data.last_batch=drop", "data.repeat=13"}),
              ElementsAre());
}

TEST(JobValidate, EffectiveBatchIsBounded) {
  const std::vector<std::string> most = {"step.batch_per_rank=65536", "resources.ranks=1024", "step.accumulation=1024"};
  EXPECT_EQ(EffectiveBatch(Job(most)), int64_t{1} << 36);
  EXPECT_THAT(Problems(most), ElementsAre(HasSubstr("step.batch_per_rank: 65536 x 1024 ranks")));
}

TEST(JobValidate, RatesFollowTheBatch) {
  EXPECT_DOUBLE_EQ(PeakLr(Job({"step.batch_per_rank=64", "resources.ranks=4"})), 8e-4);
  EXPECT_DOUBLE_EQ(PeakLr(Job({"optimizer.lr=0.5"})), 0.5);
  EXPECT_THAT(Problems({"optimizer.lr=1e-4", "schedule.min_lr=1e-3"}), ElementsAre(HasSubstr("schedule.min_lr: 0.001 is above the peak rate")));
}

TEST(JobValidate, GpuOnlyChoicesOnACpu) {
  EXPECT_THAT(Problems({"resources.device=cpu", "step.sdpa_backend=cudnn", "step.tf32=true"}),
              ElementsAre(HasSubstr("step.sdpa_backend: "), HasSubstr("step.tf32: ")));
}

TEST(JobValidate, LossScaleIsForHalfPrecision) {
  const std::vector<std::string> keys = {"step.loss_scale=1024", "step.loss_scale_growth_steps=100"};
  std::vector<std::string> half = keys;
  half.push_back("step.precision=fp16");
  EXPECT_THAT(Problems(half), ElementsAre());
  EXPECT_THAT(Problems({"step.loss_scale=65536", "step.loss_scale_growth_steps=2000"}), ElementsAre()) << "the defaults change nothing";
  EXPECT_THAT(Problems(keys), ElementsAre(HasSubstr("step.loss_scale: 1024.0 is for step.precision fp16; the precision is fp32"),
                                          HasSubstr("step.loss_scale_growth_steps: 100 is for step.precision fp16")));
}

TEST(JobValidate, WhatOnlyFusedDoesNeedsFused) {
  const std::vector<std::string> keys = {"step.reduce_dtype=bf16", "step.checkpoint_stages=[1, 4]", "step.checkpoint_decoder=true",
                                         "step.shard_optimizer=true"};
  std::vector<std::string> fused = keys;
  fused.push_back("step.mode=fused");
  EXPECT_THAT(Problems(fused), ElementsAre());
  std::vector<std::string> on_cpu = keys;
  on_cpu.push_back("resources.device=cpu");
  EXPECT_THAT(Problems(on_cpu), ElementsAre(HasSubstr("step.reduce_dtype: bf16 is for step.mode fused; the mode is optimized, to which auto comes here"),
                                            HasSubstr("step.checkpoint_stages: "), HasSubstr("step.checkpoint_decoder: "), HasSubstr("step.shard_optimizer: ")));
  EXPECT_THAT(Problems({"step.mode=fused", "step.shard_optimizer=true", "optimizer.name=muon"}), ElementsAre(HasSubstr("step.shard_optimizer: true is for optimizer.name adamw")));
  EXPECT_THAT(Problems({"step.mode=fused", "step.checkpoint_stages=[5]"}), ElementsAre(HasSubstr("step.checkpoint_stages: 5; the model has stages 1 to 4")));
}

// Field report: another size than the built-in one failed in a reshape at the first step.
TEST(JobValidate, AutoIsTheFastestModeThatDoesAllThatIsAsked) {
  EXPECT_EQ(ResolvedMode(Job().step(), /*gpu=*/true), "fused");
  EXPECT_EQ(ResolvedMode(Job().step(), /*gpu=*/false), "optimized");
  EXPECT_EQ(ResolvedMode(Job({"step.tf32=true"}).step(), true), "graph_safe");
  EXPECT_EQ(ResolvedMode(Job({"step.sdpa_backend=math"}).step(), true), "graph_safe");
  for (const bool gpu : {false, true}) EXPECT_EQ(ResolvedMode(Job({"step.mode=eager"}).step(), gpu), "eager");
  // The same as the plan says: where there is a GPU, device auto is one.
  for (const char* device : {"cuda", "auto"}) {
    EXPECT_THAT(Problems({"step.checkpoint_decoder=true", std::string("resources.device=") + device}), ElementsAre()) << device;
  }
  EXPECT_THAT(Problems({"step.checkpoint_decoder=true", "resources.device=cpu"}),
              ElementsAre(HasSubstr("step.checkpoint_decoder: true is for step.mode fused; the mode is optimized, to which auto comes here")));
  EXPECT_TRUE(UsesGpu(Job({"resources.device=auto"})));
  EXPECT_FALSE(UsesGpu(Job({"resources.device=auto"}), /*there_is_one=*/false));
  EXPECT_TRUE(UsesGpu(Job({"resources.device=cuda"}), false));
  EXPECT_FALSE(UsesGpu(Job({"resources.device=cpu"}), true));
  EXPECT_THAT(Problems({"step.checkpoint_decoder=true", "resources.device=cuda", "step.tf32=true"}),
              ElementsAre(HasSubstr("step.checkpoint_decoder: true is for step.mode fused")));
}

TEST(JobValidate, IllegalSizesNameTheKey) {
  EXPECT_THAT(Problems({"model.input_size=[225, 225]"}), ElementsAre(HasSubstr("model.input_size: 225")));
  EXPECT_THAT(Problems({"model.input_size=[224]"}), ElementsAre());
  v1::JobSpec eeg = Eeg();
  eeg.mutable_model()->set_input_size(0, 1000);
  EXPECT_THAT(ValidateJob(eeg), ElementsAre(HasSubstr("model.input_size: 1000")));
}

// Field report: a mask that keeps or removes nothing divided by zero.
TEST(JobValidate, AMaskKeepsAndRemovesSomething) {
  EXPECT_THAT(Problems({"model.mask_ratio=0.999"}), ElementsAre(HasSubstr("model.mask_ratio: ")));
  EXPECT_THAT(Problems({"model.mask_ratio=1e-9"}), ElementsAre()) << "49 * (1 - 1e-9) rounds down to 48: one is removed";
  EXPECT_THAT(Problems({"model.input_size=[32, 32]"}), ElementsAre(HasSubstr("model.input_size: ")));
}

TEST(JobValidate, HugeSamplesAreRefusedWithoutOverflow) {
  EXPECT_THAT(Problems({"model.input_size=[65536, 65536, 65536]", "model.in_chans=4096"}),
              ElementsAre(HasSubstr("model.input_size: ")));
}

// The daemon trusts no client: what YAML would refuse is refused here too.
TEST(JobValidate, ValuesThatNoYamlCouldGive) {
  v1::JobSpec spec = Job();
  spec.set_name("a b");
  spec.mutable_step()->set_batch_per_rank(-1);
  spec.mutable_step()->set_precision("fp64");
  spec.mutable_model()->set_mask_ratio(std::numeric_limits<double>::quiet_NaN());
  spec.mutable_output()->set_folder("relative");
  EXPECT_THAT(ValidateJob(spec),
              ElementsAre(HasSubstr("name: "), HasSubstr("model.mask_ratio: .nan is not allowed"),
                          HasSubstr("step.precision: "), HasSubstr("step.batch_per_rank: -1"),
                          "output.folder: \"relative\" is not an absolute path"));
  spec = Job();
  spec.mutable_output()->set_folder("/runs/../etc");
  spec.mutable_model()->set_init_from(std::string("/a\0b", 4));
  EXPECT_THAT(ValidateJob(spec), ElementsAre(HasSubstr("model.init_from: \"/a\\x00b\" has a control character"),
                                             HasSubstr("output.folder: \"/runs/../etc\" has \"..\" in it")));
  spec = Job();
  spec.clear_name();
  EXPECT_THAT(ValidateJob(spec), ElementsAre("name: is missing; give text"));
}

TEST(JobValidate, KeysOfANewerVersionAreNotDropped) {
  v1::JobSpec spec = Job();
  ASSERT_TRUE(spec.mutable_optimizer()->MergeFromString("\xa0\x06\x01"));   // field 100, varint 1
  EXPECT_THAT(ValidateJob(spec), ElementsAre(HasSubstr("optimizer: has key number 100")));
}

}  // namespace
}  // namespace hierad
