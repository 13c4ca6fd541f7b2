// Promises of the step, on the CPU and in every mode.
#include "worker/step/step.h"

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/job_yaml.h"
#include "base/random.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/test_models.h"

namespace hierad {
namespace {

using ::testing::HasSubstr;

struct Rig {
  explicit Rig(v1::JobSpec job) : spec(std::move(job)) {
    FillDefaults(&spec);
    geometry = *Geometry::From(spec.model());
    table = ParameterTable::For(geometry);
    communicator = MakeSelfCommunicator();
    auto made = MakeStep({spec, false, 1}, geometry, table, communicator.get());
    EXPECT_TRUE(made.ok()) << made.status();
    step = *std::move(made);
    EXPECT_TRUE(step->Initialize().ok());
    sample_size = geometry.spec.in_chans() * std::accumulate(geometry.input_size.begin(), geometry.input_size.end(),
                                                             int64_t{1}, std::multiplies<>());
  }

  // `rows` rows of memory, of which `real` hold samples first, first + 1, ...; the rest are zeros.
  MicroBatch Batch(int first, int real, int rows) {
    memory.push_back(std::make_unique<Memory>());
    Memory& m = *memory.back();
    m.x.assign(rows * sample_size, 0.0f);
    m.labels.assign(rows, -1);
    m.ids.assign(rows, 0);
    for (int i = 0; i < real; ++i) {
      const RandomStream stream{11, Draw::kSynthetic, 0, uint64_t(first + i)};
      for (int64_t j = 0; j < sample_size; ++j) m.x[i * sample_size + j] = 2 * stream.Uniform(j) - 1;
      m.labels[i] = (first + i) % 3;
      m.ids[i] = first + i;
    }
    return {m.x.data(), m.labels.data(), m.ids.data(), real, 0};
  }

  StepResult Run(std::vector<MicroBatch> batches, int64_t real, StepSignals signals = {}) {
    auto result = step->RunAndTake(batches, real, 1e-3, signals);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : StepResult{};
  }

  struct Memory {
    std::vector<float> x;
    std::vector<int64_t> labels;
    std::vector<uint64_t> ids;
  };
  v1::JobSpec spec;
  Geometry geometry;
  ParameterTable table;
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<Step> step;
  int64_t sample_size = 0;
  std::vector<std::unique_ptr<Memory>> memory;
};

v1::JobSpec Job(const std::string& mode, int batch, int accumulation = 1, const std::string& task = "mae", int dims = 1) {
  v1::JobSpec spec;
  *spec.mutable_model() = SmallModel(dims, task);
  spec.mutable_step()->set_mode(mode);
  spec.mutable_step()->set_batch_per_rank(batch);
  spec.mutable_step()->set_accumulation(accumulation);
  spec.set_seed(3);
  return spec;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += double(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

class StepTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Modes, StepTest, testing::Values("eager", "optimized", "graph_safe"),
                         [](const auto& info) { return info.param; });

TEST_P(StepTest, LossFalls) {
  for (const char* task : {"mae", "classify"}) {
    Rig rig(Job(GetParam(), 4, 1, task));
    const MicroBatch batch = rig.Batch(0, 4, 4);
    const double first = rig.Run({batch}, 4).loss;
    double last = first;
    for (int i = 0; i < 30; ++i) last = rig.Run({batch}, 4).loss;
    EXPECT_LT(last, 0.95 * first) << task;
    EXPECT_GT(last, 0) << task;
  }
}

// A short batch is the exact mean over its real samples, as if it had been made to fit.
TEST_P(StepTest, MissingSamplesWeighNothing) {
  Rig padded(Job(GetParam(), 6)), exact(Job(GetParam(), 4));
  const StepResult a = padded.Run({padded.Batch(10, 4, 6)}, 4);
  const StepResult b = exact.Run({exact.Batch(10, 4, 4)}, 4);
  EXPECT_NEAR(a.loss, b.loss, 1e-6 * b.loss);
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-5 * b.grad_norm);
  EXPECT_LT(Distance(padded.step->Save()->exp_avg, exact.step->Save()->exp_avg), 1e-5);
}

TEST_P(StepTest, AccumulationIsOneBigBatch) {
  Rig pieces(Job(GetParam(), 2, 3)), whole(Job(GetParam(), 6));
  // Five real samples: the last piece is short, and weighs by its samples.
  const StepResult a = pieces.Run({pieces.Batch(0, 2, 2), pieces.Batch(2, 2, 2), pieces.Batch(4, 1, 2)}, 5);
  const StepResult b = whole.Run({whole.Batch(0, 5, 6)}, 5);
  EXPECT_NEAR(a.loss, b.loss, 1e-5 * b.loss);
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-5 * b.grad_norm);
  EXPECT_LT(Distance(pieces.step->Save()->exp_avg, whole.step->Save()->exp_avg), 1e-5);
}

TEST_P(StepTest, AMicroBatchWithoutSamplesIsPassedOver) {
  Rig with(Job(GetParam(), 2, 2)), without(Job(GetParam(), 2, 1));
  const StepResult a = with.Run({with.Batch(0, 2, 2), with.Batch(2, 0, 2)}, 2);
  const StepResult b = without.Run({without.Batch(0, 2, 2)}, 2);
  EXPECT_EQ(a.loss, b.loss);
}

TEST_P(StepTest, ResumeIsBitExact) {
  v1::JobSpec job = Job(GetParam(), 3);
  job.mutable_model()->set_drop_path_rate(0.3);
  Rig through(job), before(job);
  for (int i = 0; i < 6; ++i) through.Run({through.Batch(3 * i, 3, 3)}, 3);
  for (int i = 0; i < 3; ++i) before.Run({before.Batch(3 * i, 3, 3)}, 3);
  auto state = before.step->Save();
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(state->step, 3);
  EXPECT_EQ(state->updates, 3);
  Rig after(job);
  ASSERT_TRUE(after.step->Load(*state).ok());
  for (int i = 3; i < 6; ++i) after.Run({after.Batch(3 * i, 3, 3)}, 3);
  const TrainState a = *after.step->Save(), b = *through.step->Save();
  EXPECT_EQ(a.parameters, b.parameters);
  EXPECT_EQ(a.exp_avg, b.exp_avg);
  EXPECT_EQ(a.exp_avg_sq, b.exp_avg_sq);
  EXPECT_EQ(a.step, b.step);
}

TEST_P(StepTest, ANonFiniteStepChangesNothingAndIsCounted) {
  v1::JobSpec job = Job(GetParam(), 2);
  job.mutable_step()->set_max_nan_steps(3);
  Rig rig(job);
  rig.Run({rig.Batch(0, 2, 2)}, 2);
  const TrainState before = *rig.step->Save();
  MicroBatch bad = rig.Batch(2, 2, 2);
  rig.memory.back()->x[0] = std::numeric_limits<float>::infinity();
  const StepResult result = rig.Run({bad}, 2);
  EXPECT_TRUE(result.skipped);
  EXPECT_FALSE(std::isfinite(result.loss));
  const TrainState after = *rig.step->Save();
  EXPECT_EQ(after.parameters, before.parameters);
  EXPECT_EQ(after.exp_avg, before.exp_avg);
  EXPECT_EQ(after.exp_avg_sq, before.exp_avg_sq);
  EXPECT_EQ(after.updates, before.updates);
  EXPECT_EQ(after.step, before.step + 1);
  EXPECT_EQ(after.nan_steps_in_row, 1);
  EXPECT_FALSE(rig.Run({rig.Batch(4, 2, 2)}, 2).skipped);
  EXPECT_EQ(rig.step->Save()->nan_steps_in_row, 0);
  rig.Run({bad}, 2);
  rig.Run({bad}, 2);
  const auto third = rig.step->RunAndTake(std::vector<MicroBatch>{bad}, 2, 1e-3, {});
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_TRUE(third->halted);
  EXPECT_EQ(third->nan_in_row, 3);
  EXPECT_EQ(third->step, 6);
  // From here on nothing changes, whatever comes, until a state is loaded.
  const TrainState halted = *rig.step->Save();
  EXPECT_TRUE(rig.Run({rig.Batch(4, 2, 2)}, 2).skipped);
  EXPECT_EQ(rig.step->Save()->parameters, halted.parameters);
  EXPECT_EQ(rig.step->Save()->updates, halted.updates);
  ASSERT_TRUE(rig.step->Load(halted).ok());
  EXPECT_FALSE(rig.Run({rig.Batch(4, 2, 2)}, 2).skipped);
  EXPECT_NE(rig.step->Save()->parameters, halted.parameters);
}

TEST_P(StepTest, OnNanStopEndsAtOnce) {
  v1::JobSpec job = Job(GetParam(), 1);
  job.mutable_step()->set_on_nan("stop");
  Rig rig(job);
  const MicroBatch bad = rig.Batch(0, 1, 1);
  rig.memory.back()->x[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(rig.Run({bad}, 1).halted);
}

TEST_P(StepTest, SignalsComeBack) {
  Rig rig(Job(GetParam(), 1));
  EXPECT_FALSE(rig.Run({rig.Batch(0, 1, 1)}, 1).signals.stop);
  const StepResult result = rig.Run({rig.Batch(0, 1, 1)}, 1, {.stop = true, .checkpoint = false});
  EXPECT_TRUE(result.signals.stop);
  EXPECT_FALSE(result.signals.checkpoint);
  EXPECT_TRUE(rig.Run({rig.Batch(0, 1, 1)}, 1, {.stop = false, .checkpoint = true}).signals.checkpoint);
}

TEST_P(StepTest, ClippingBoundsTheUpdateNotTheReportedNorm) {
  v1::JobSpec tight = Job(GetParam(), 2);
  tight.mutable_optimizer()->set_clip_norm(1e-3);
  v1::JobSpec none = Job(GetParam(), 2);
  none.mutable_optimizer()->set_clip_norm(0);
  Rig clipped(tight), free(none);
  const StepResult a = clipped.Run({clipped.Batch(0, 2, 2)}, 2), b = free.Run({free.Batch(0, 2, 2)}, 2);
  EXPECT_EQ(a.grad_norm, b.grad_norm);
  ASSERT_GT(a.grad_norm, 1e-3);
  double sum = 0;
  const TrainState state = *clipped.step->Save();
  for (float m : state.exp_avg) sum += double(m) * m;
  EXPECT_NEAR(std::sqrt(sum), 0.1 * 1e-3, 1e-6);   // (1 - beta1) of the clipped norm
}

TEST_P(StepTest, EvaluationIsTheSameEachTimeAndChangesNothing) {
  Rig rig(Job(GetParam(), 4));
  const MicroBatch batch = rig.Batch(0, 3, 4);
  const TrainState before = *rig.step->Save();
  const auto a = rig.step->Evaluate(batch), b = rig.step->Evaluate(batch);
  ASSERT_TRUE(a.ok()) << a.status();
  EXPECT_EQ(a->numerator, b->numerator);
  const Geometry& g = rig.geometry;
  EXPECT_EQ(a->weight, 3.0 * double((g.num_mask_units - g.num_kept) * g.mask_unit_final_tokens * g.pred_dim));
  EXPECT_EQ(rig.step->Save()->parameters, before.parameters);
  EXPECT_EQ(rig.step->Evaluate(rig.Batch(0, 0, 4))->weight, 0);
}

TEST_P(StepTest, FeaturesHaveARowForEachRealSample) {
  Rig rig(Job(GetParam(), 4));
  const auto features = rig.step->Features(rig.Batch(0, 3, 4));
  ASSERT_TRUE(features.ok()) << features.status();
  ASSERT_EQ(int64_t(features->size()), 3 * rig.geometry.encoder_dim_out);
  for (float value : *features) EXPECT_TRUE(std::isfinite(value));
  const auto alone = rig.step->Features(rig.Batch(1, 1, 4));
  for (int64_t i = 0; i < rig.geometry.encoder_dim_out; ++i) {
    EXPECT_NEAR((*alone)[i], (*features)[rig.geometry.encoder_dim_out + i], 1e-5);
  }
}

TEST(StepModesTest, AllModesTakeTheSamePath) {
  for (int dims : {1, 2, 3}) {
    for (const char* task : {"mae", "classify"}) {
      v1::JobSpec eager = Job("eager", 3, 1, task, dims), optimized = Job("optimized", 3, 1, task, dims),
                  graph_safe = Job("graph_safe", 3, 1, task, dims);
      for (v1::JobSpec* job : {&eager, &optimized, &graph_safe}) {
        job->mutable_model()->set_drop_path_rate(0.2);
        job->mutable_model()->set_head_dropout(0.2);
      }
      Rig a(eager), b(optimized), c(graph_safe);
      for (int i = 0; i < 4; ++i) {
        const double loss = a.Run({a.Batch(3 * i, 2, 3)}, 2).loss;
        EXPECT_NEAR(b.Run({b.Batch(3 * i, 2, 3)}, 2).loss, loss, 1e-4 * loss) << dims << task << i;
        EXPECT_NEAR(c.Run({c.Batch(3 * i, 2, 3)}, 2).loss, loss, 1e-4 * loss) << dims << task << i;
      }
    }
  }
}

// What is drawn is what the loss sees: the squared errors of the drawn predictions are Evaluate's numerator.
TEST(StepModesTest, PicturesAreTheLossMadeVisible) {
  for (const int dims : {1, 2, 3}) {
    for (const char* mode : {"eager", "optimized", "fused"}) {
      for (const bool norm : {false, true}) {
        SCOPED_TRACE(testing::Message() << dims << "-D " << mode << (norm ? ", normalised" : ""));
        v1::JobSpec job = Job(mode, 4);
        *job.mutable_model() = SmallModel(dims);
        job.mutable_model()->set_norm_target(norm);
        Rig rig(job);
        const MicroBatch batch = rig.Batch(0, 3, 4);
        const std::vector<float>& given = rig.memory.back()->x;
        const auto r = rig.step->Reconstruct(batch);
        ASSERT_TRUE(r.ok()) << r.status();
        const Geometry& g = rig.geometry;
        // Of a video the frames that are predicted, as images.
        const int64_t frames = dims == 3 ? g.tokens_final[0] : 1, stride = dims == 3 ? g.patch_stride[0] : 1;
        ASSERT_EQ(r->samples, 3 * frames);
        ASSERT_EQ(r->size, std::vector<int64_t>(g.input_size.begin() + (dims == 3), g.input_size.end()));
        const int64_t extent = dims == 1 ? r->size[0] : r->size[0] * r->size[1], size = extent * r->channels, width = r->size.back();
        double numerator = 0;
        int64_t removed = 0;
        for (int64_t s = 0; s < r->samples; ++s) {
          // Patches: of a signal a stretch of pred_stride points, of an image a square; all channels of it.
          std::map<int64_t, std::vector<int64_t>> patches;
          for (int64_t i = 0; i < size; ++i) {
            const int64_t length = dims == 3 ? g.input_size[0] : 1;
            EXPECT_EQ(r->input[s * size + i], given[s / frames * rig.sample_size + (i / extent * length + s % frames * stride) * extent + i % extent]);
            if (r->masked[s * size + i] == 0) {
              EXPECT_EQ(r->predicted[s * size + i], r->input[s * size + i]);
            }
            const int64_t at = i % extent;
            const int64_t patch = dims == 1 ? at / g.pred_stride
                                            : at / width / g.pred_stride * 1000 + at % width / g.pred_stride;
            patches[patch].push_back(s * size + i);
          }
          for (const auto& [patch, elements] : patches) {
            double mean = 0, variance = 0, error = 0;
            for (const int64_t e : elements) mean += r->input[e] / double(elements.size());
            for (const int64_t e : elements) variance += (r->input[e] - mean) * (r->input[e] - mean) / double(elements.size() - 1);
            for (const int64_t e : elements) {
              EXPECT_EQ(r->masked[e], r->masked[elements[0]]) << "a patch is removed or kept as a whole";
              error += std::pow(double(r->predicted[e]) - r->input[e], 2);
            }
            removed += r->masked[elements[0]] != 0;
            numerator += norm ? error / (variance + 1e-6) : error;
          }
          if ((s + 1) % frames != 0) continue;
          EXPECT_EQ(removed, (g.num_mask_units - g.num_kept) * g.mask_unit_final_tokens);
          removed = 0;
        }
        const auto sum = rig.step->Evaluate(batch);
        ASSERT_TRUE(sum.ok());
        EXPECT_NEAR(numerator, sum->numerator, 1e-3 * sum->numerator);
      }
    }
  }
}

TEST(StepModesTest, Bf16Trains) {
  v1::JobSpec job = Job("optimized", 4);
  job.mutable_step()->set_precision("bf16");
  Rig rig(job);
  const MicroBatch batch = rig.Batch(0, 4, 4);
  const double first = rig.Run({batch}, 4).loss;
  double last = first;
  for (int i = 0; i < 30; ++i) last = rig.Run({batch}, 4).loss;
  EXPECT_LT(last, 0.95 * first);
}

TEST(StepModesTest, LabelsOutOfRangeAreDataErrors) {
  Rig rig(Job("optimized", 2, 1, "classify"));
  const MicroBatch batch = rig.Batch(0, 2, 2);
  rig.memory.back()->labels[1] = 7;
  const auto result = rig.step->RunAndTake(std::vector<MicroBatch>{batch}, 2, 1e-3, {});
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(ReasonOf(result.status()), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(result.status().message()), AllOf(HasSubstr("label 7"), HasSubstr("0 to 2")));
}

TEST(StepModesTest, RefusesWhatACpuCannotDo) {
  v1::JobSpec job = Job("optimized", 2);
  job.mutable_step()->set_sdpa_backend("cudnn");
  FillDefaults(&job);
  const Geometry geometry = *Geometry::From(job.model());
  const auto communicator = MakeSelfCommunicator();
  const auto made = MakeTorchStep({job, false, 1}, geometry, ParameterTable::For(geometry), communicator.get());
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(ReasonOf(made.status()), v1::REASON_USER_ERROR);
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("step.sdpa_backend: cudnn"));
}

}  // namespace
}  // namespace hierad
