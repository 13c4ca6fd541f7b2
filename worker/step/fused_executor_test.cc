#include "worker/step/fused_executor.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "base/plan/random_jobs.h"
#include "worker/kernels/reference/types.h"
#include "worker/step/fused_testing.h"

namespace hierad {
namespace {

FusedRun Make(const v1::JobSpec& job, ComputeType compute, bool poison) {
  auto plan = Plan::Make(job, {.compute = compute});
  EXPECT_TRUE(plan.ok()) << plan.status();
  FusedRun run(*std::move(plan), poison);
  run.FillParameters();
  run.FillInput(11);
  return run;
}

void ForwardBackward(FusedRun* run) {
  run->executor().ClearSums();
  ASSERT_TRUE(run->executor().RunForwardBackward().ok());
}

double Norm(const std::vector<double>& v) {
  double sum = 0;
  for (double x : v) sum += x * x;
  return std::sqrt(sum);
}

double Distance(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> difference(a.size());
  for (size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return Norm(difference);
}

// Every parameter's gradient, at its largest element or at one chosen at random, against differences of fourth order in fp64.
TEST(FusedExecutorTest, GradientsEqualFiniteDifferences) {
  RandomJobs jobs(41);
  for (int i = 0; i < 20; ++i) {
    const v1::JobSpec job = jobs.Next();
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    FusedRun run = Make(job, ComputeType::kF64, /*poison=*/true);
    ForwardBackward(&run);
    const Plan& plan = run.plan();
    std::vector<std::vector<double>> gradients;
    for (size_t p = 0; p < plan.table.parameters.size(); ++p) gradients.push_back(run.Gradient(p));
    auto loss_at = [&](int64_t element, double value) {
      run.Set(plan.master, element, value);
      run.executor().ClearSums();
      EXPECT_TRUE(run.executor().RunForward().ok());
      return run.Loss();
    };
    for (size_t p = 0; p < gradients.size(); ++p) {
      const std::vector<double>& g = gradients[p];
      const auto largest = std::max_element(g.begin(), g.end(), [](double a, double b) { return std::abs(a) < std::abs(b); });
      const int64_t element = (p + i) % 2 == 0 ? largest - g.begin() : jobs.Pick(0, int(g.size()) - 1);
      const int64_t at = plan.parameter_offset[p] + element;
      const double value = run.At(plan.master, at), h = 1e-5;
      const double near = loss_at(at, value + h) - loss_at(at, value - h), far = loss_at(at, value + 2 * h) - loss_at(at, value - 2 * h);
      const double slope = (8 * near - far) / (12 * h);
      run.Set(plan.master, at, value);
      EXPECT_NEAR(g[element], slope, 1e-6 * std::max(1.0, std::abs(slope))) << plan.table.parameters[p].name << "[" << element << "]";
    }
    if (HasFailure()) return;
  }
}

TEST(FusedExecutorTest, PoisonChangesNoBit) {
  RandomJobs jobs(43);
  for (int i = 0; i < 40; ++i) {
    const v1::JobSpec job = jobs.Next();
    SCOPED_TRACE(job.model().ShortDebugString());
    for (ComputeType compute : {ComputeType::kF64, ComputeType::kF32, i % 2 == 0 ? ComputeType::kBF16 : ComputeType::kF16}) {
      FusedRun plain = Make(job, compute, false), poisoned = Make(job, compute, true);
      ForwardBackward(&plain);
      ForwardBackward(&plain);   // what a run leaves behind does not matter either
      ForwardBackward(&poisoned);
      EXPECT_EQ(plain.Loss(), poisoned.Loss());
      EXPECT_EQ(plain.AllGradients(), poisoned.AllGradients());
      EXPECT_GT(Norm(plain.AllGradients()), 0);
    }
  }
}

TEST(FusedExecutorTest, NarrowTypesAgreeWithDouble) {
  RandomJobs jobs(47);
  for (int i = 0; i < 30; ++i) {
    const v1::JobSpec job = jobs.Next();
    SCOPED_TRACE(job.model().ShortDebugString());
    FusedRun exact = Make(job, ComputeType::kF64, true), single = Make(job, ComputeType::kF32, true);
    FusedRun brain = Make(job, ComputeType::kBF16, true), half = Make(job, ComputeType::kF16, true);
    for (FusedRun* run : {&exact, &single, &brain, &half}) ForwardBackward(run);
    EXPECT_NEAR(single.Loss(), exact.Loss(), 1e-5 * exact.Loss());
    EXPECT_NEAR(brain.Loss(), exact.Loss(), 0.1 * exact.Loss());
    EXPECT_NEAR(half.Loss(), exact.Loss(), 0.015 * exact.Loss());
    const std::vector<double> gradients = exact.AllGradients();
    EXPECT_LT(Distance(single.AllGradients(), gradients), 1e-4 * Norm(gradients));
    EXPECT_LT(Distance(brain.AllGradients(), gradients), 0.3 * Norm(gradients));
    EXPECT_GT(Distance(brain.AllGradients(), gradients), 1e-5 * Norm(gradients)) << "bf16 rounds nothing";
    std::vector<double> unscaled = half.AllGradients();
    for (double& g : unscaled) g /= half.record().scale.value;
    EXPECT_LT(Distance(unscaled, gradients), 0.04 * Norm(gradients));
    EXPECT_GT(Distance(unscaled, gradients), 1e-6 * Norm(gradients)) << "fp16 rounds nothing";
  }
}

TEST(FusedExecutorTest, WhatIsComputedAgainChangesNoBit) {
  RandomJobs jobs(49);
  for (int i = 0; i < 25; ++i) {
    v1::JobSpec job = jobs.Next();
    SCOPED_TRACE(job.model().ShortDebugString());
    for (ComputeType compute : {ComputeType::kF64, ComputeType::kF32, i % 2 == 0 ? ComputeType::kBF16 : ComputeType::kF16}) {
      job.mutable_step()->clear_checkpoint_stages();
      job.mutable_step()->clear_checkpoint_decoder();
      FusedRun kept = Make(job, compute, true);
      for (int stage = 1; stage <= job.model().stages_size(); ++stage) {
        if (jobs.Pick(0, 1) == 1) job.mutable_step()->add_checkpoint_stages(stage);
      }
      job.mutable_step()->set_checkpoint_decoder(jobs.Pick(0, 1) == 1);
      FusedRun again = Make(job, compute, true);
      ForwardBackward(&kept);
      ForwardBackward(&again);
      EXPECT_EQ(kept.Loss(), again.Loss());
      EXPECT_EQ(kept.AllGradients(), again.AllGradients());
      EXPECT_EQ(kept.plan().parameter_offset, again.plan().parameter_offset);
    }
  }
}

TEST(FusedExecutorTest, MicroBatchesAddUp) {
  RandomJobs jobs(53);
  for (int i = 0; i < 20; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_accumulation(1);
    FusedRun once = Make(job, ComputeType::kF64, true);
    job.mutable_step()->set_accumulation(2);
    FusedRun adding = Make(job, ComputeType::kF64, true);
    std::vector<double> sum(once.AllGradients().size(), 0.0);
    double loss = 0;
    adding.executor().ClearSums();
    for (uint32_t seed : {61u, 62u}) {
      once.FillInput(seed);
      adding.FillInput(seed);
      ASSERT_TRUE(once.executor().RunForwardBackward().ok());
      ASSERT_TRUE(adding.executor().RunForwardBackward().ok());
      const std::vector<double> part = once.AllGradients();
      for (size_t k = 0; k < sum.size(); ++k) sum[k] += part[k];
      loss += once.Loss();
    }
    EXPECT_NEAR(adding.Loss(), loss, 1e-12 * loss);
    EXPECT_LT(Distance(adding.AllGradients(), sum), 1e-12 * Norm(sum)) << job.model().ShortDebugString();
  }
}

// Rows that are not real weigh nothing, whatever the slot holds there; the rest is what a smaller batch computes.
TEST(FusedExecutorTest, ShortBatchEqualsASmallerBatch) {
  RandomJobs jobs(59);
  for (int i = 0; i < 20; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_batch_per_rank(3);
    FusedRun whole = Make(job, ComputeType::kF64, true);
    job.mutable_step()->set_batch_per_rank(2);
    FusedRun small = Make(job, ComputeType::kF64, true);
    const Plan& p = whole.plan();
    const int64_t row = p.tensors[p.source].bytes / 6;
    std::memcpy(small.executor().Get<char>(small.plan().source), whole.executor().Get<char>(p.source), 2 * row);
    std::memset(whole.executor().Get<char>(p.source) + 2 * row, 0xFF, row);
    for (int b = 0; b < 2; ++b) {
      small.executor().Get<int64_t>(small.plan().source_ids)[b] = whole.executor().Get<int64_t>(p.source_ids)[b];
      small.executor().Get<int64_t>(small.plan().source_labels)[b] = whole.executor().Get<int64_t>(p.source_labels)[b];
    }
    whole.executor().Get<int64_t>(p.source_labels)[2] = -1;
    whole.scalars().real = 2;
    whole.scalars().loss_weight = small.scalars().loss_weight;
    ForwardBackward(&whole);
    ForwardBackward(&small);
    EXPECT_DOUBLE_EQ(whole.Loss(), small.Loss());
    EXPECT_LT(Distance(whole.AllGradients(), small.AllGradients()), 1e-12 * Norm(small.AllGradients())) << job.model().ShortDebugString();
  }
}

TEST(FusedExecutorTest, UpdateIsAdamWAndSkipsWhatIsNotFinite) {
  RandomJobs jobs(67);
  v1::JobSpec job = jobs.Next();
  job.mutable_optimizer()->set_clip_norm(0.01);
  FusedRun run = Make(job, ComputeType::kF64, true);
  const Plan& plan = run.plan();
  const v1::OptimizerSpec& o = job.optimizer();
  std::vector<std::vector<double>> value, m, v;
  for (size_t p = 0; p < plan.table.parameters.size(); ++p) {
    value.push_back(run.Values(plan.master, p));
    m.emplace_back(value[p].size(), 0.0);
    v.emplace_back(value[p].size(), 0.0);
  }
  for (int t = 1; t <= 3; ++t) {
    ForwardBackward(&run);
    const double norm = Norm(run.AllGradients()), clip = o.clip_norm() / (norm + 1e-6), lr = run.scalars().lr;
    ASSERT_LT(clip, 1);
    ASSERT_TRUE(run.executor().RunUpdate().ok());
    EXPECT_EQ(run.record().updates, t);
    EXPECT_EQ(run.record().skipped, 0);
    EXPECT_NEAR(run.record().grad_norm, norm, 1e-12 * norm);
    EXPECT_DOUBLE_EQ(run.record().loss, run.Loss());
    for (size_t p = 0; p < value.size(); ++p) {
      const std::vector<double> g = run.Gradient(p), got = run.Values(plan.master, p);
      for (size_t i = 0; i < g.size(); ++i) {
        m[p][i] = o.beta1() * m[p][i] + (1 - o.beta1()) * clip * g[i];
        v[p][i] = o.beta2() * v[p][i] + (1 - o.beta2()) * clip * clip * g[i] * g[i];
        const double mean = m[p][i] / (1 - std::pow(o.beta1(), t)), variance = v[p][i] / (1 - std::pow(o.beta2(), t));
        const double decay = plan.table.parameters[p].decay ? o.weight_decay() : 0;
        value[p][i] -= lr * (decay * value[p][i] + mean / (std::sqrt(variance) + o.eps()));
        ASSERT_NEAR(got[i], value[p][i], 1e-9) << plan.table.parameters[p].name << " step " << t;
      }
    }
  }
  const std::vector<double> before = run.Values(plan.master, 0);
  ForwardBackward(&run);
  run.Set(plan.gradients, plan.flat_size / 2, NAN);
  ASSERT_TRUE(run.executor().RunUpdate().ok());
  EXPECT_EQ(run.record().skipped, 1);
  EXPECT_EQ(run.record().updates, 3);
  EXPECT_EQ(run.record().nan_in_row, 1);
  EXPECT_EQ(run.Values(plan.master, 0), before);
}

// Gradients that are not finite are an overflow of the scale until it is 1, then a step like any that is not finite.
TEST(FusedExecutorTest, OverflowsHalveTheScaleDownToOne) {
  RandomJobs jobs(69);
  const v1::JobSpec job = jobs.Next();
  FusedRun run = Make(job, ComputeType::kF16, true);
  run.scalars().nan_limit = 1;
  run.record().scale = {4, 7};
  ForwardBackward(&run);
  run.Set(run.plan().gradients, run.plan().flat_size / 2, INFINITY);
  const std::vector<double> before = run.Values(run.plan().master, 0);
  for (const double scale : {4, 2, 1}) {
    EXPECT_EQ(run.record().halted, 0);
    EXPECT_EQ(run.record().scale.value, scale);
    ASSERT_TRUE(run.executor().RunUpdate().ok());
    EXPECT_EQ(run.record().skipped, 1);
    EXPECT_EQ(run.record().overflowed, scale > 1 ? 1 : 0);
    EXPECT_EQ(run.record().nan_in_row, scale > 1 ? 0 : 1);
    EXPECT_EQ(run.record().scale.good_steps, 0);
    EXPECT_EQ(run.record().scaled_by, scale);
  }
  EXPECT_EQ(run.record().scale.value, 1);
  EXPECT_EQ(run.record().halted, 1);
  EXPECT_EQ(run.record().updates, 0);
  EXPECT_EQ(run.Values(run.plan().master, 0), before);
}

TEST(FusedExecutorTest, HalfPrecisionRoundsToNearest) {
  using reference::Float16;
  // Every number of half precision, and what lies around the middle between it and the next.
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const float value = HalfToFloat(uint16_t(bits));
    const float next = bits == 0x7BFF ? 65536.0f : HalfToFloat(uint16_t(bits + 1)), middle = (value + next) / 2;
    const auto of = [](float v) { return uint32_t(Float16(v).bits); };
    ASSERT_EQ(of(value), bits);
    ASSERT_EQ(of(-value), bits | 0x8000);
    ASSERT_EQ(of(std::nextafter(middle, 0.0f)), bits);
    ASSERT_EQ(of(middle), bits + (bits & 1));
    ASSERT_EQ(of(std::nextafter(middle, INFINITY)), bits + 1);
  }
  EXPECT_TRUE(std::isinf(float(Float16(1e30f))) && std::isinf(float(Float16(-INFINITY))));
  EXPECT_TRUE(std::isnan(float(Float16(NAN))));
}

// In double, written out: one matrix at a time, products by their definition.
std::vector<double> Orthogonal(std::vector<double> x, int64_t rows, int64_t cols) {
  double squares = 0;
  for (double v : x) squares += v * v;
  for (double& v : x) v /= std::max(std::sqrt(squares), 1e-7);
  auto product = [](const std::vector<double>& a, const std::vector<double>& b, int64_t m, int64_t n, int64_t k) {
    std::vector<double> c(m * n, 0.0);
    for (int64_t i = 0; i < m; ++i) for (int64_t j = 0; j < n; ++j) for (int64_t l = 0; l < k; ++l) c[i * n + j] += a[i * k + l] * b[l * n + j];
    return c;
  };
  auto transpose = [](const std::vector<double>& a, int64_t m, int64_t n) {
    std::vector<double> t(a.size());
    for (int64_t i = 0; i < m; ++i) for (int64_t j = 0; j < n; ++j) t[j * m + i] = a[i * n + j];
    return t;
  };
  const bool tall = rows > cols;
  if (tall) x = transpose(x, rows, cols), std::swap(rows, cols);
  for (int round = 0; round < 5; ++round) {
    const std::vector<double> gram = product(x, transpose(x, rows, cols), rows, rows, cols), squared = product(gram, gram, rows, rows, rows);
    std::vector<double> polynomial(gram.size());
    for (size_t i = 0; i < gram.size(); ++i) polynomial[i] = -4.7750 * gram[i] + 2.0315 * squared[i];
    const std::vector<double> turned = product(polynomial, x, rows, cols, rows);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + turned[i];
  }
  return tall ? transpose(x, rows, cols) : x;
}

TEST(FusedExecutorTest, UpdateIsMuonForMatricesAndAdamWForTheRest) {
  RandomJobs jobs(69);
  for (int i = 0; i < 8; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_optimizer()->set_name("muon");
    job.mutable_optimizer()->set_clip_norm(i % 2 == 0 ? 0.01 : 0);
    job.mutable_optimizer()->set_muon_nesterov(i % 4 < 2);
    job.mutable_optimizer()->set_layer_decay(i % 3 == 0 ? 1.0 : 0.7);
    SCOPED_TRACE(job.model().ShortDebugString());
    const v1::OptimizerSpec& o = job.optimizer();
    FusedRun run = Make(job, ComputeType::kF64, true);
    const Plan& plan = run.plan();
    const auto& parameters = plan.table.parameters;
    std::vector<std::vector<double>> value, m, v;
    for (size_t p = 0; p < parameters.size(); ++p) {
      value.push_back(run.Values(plan.master, p));
      m.emplace_back(value[p].size(), 0.0);
      v.emplace_back(value[p].size(), 0.0);
    }
    int matrices = 0;
    for (int t = 1; t <= 3; ++t) {
      ForwardBackward(&run);
      const double norm = Norm(run.AllGradients()), clip = o.clip_norm() > 0 ? std::min(1.0, o.clip_norm() / (norm + 1e-6)) : 1;
      ASSERT_TRUE(run.executor().RunUpdate().ok());
      for (size_t p = 0; p < parameters.size(); ++p) {
        const std::string& name = parameters[p].name;
        const bool matrix = absl::StrContains(name, "blocks.") && absl::EndsWith(name, ".weight") && parameters[p].shape.size() == 2;
        const int layers = int(job.model().stages_size() == 0 ? 0 : plan.geometry.blocks.size());
        const bool stem = absl::StartsWith(name, "pos_embed") || absl::StartsWith(name, "patch_embed");
        const int layer = absl::StartsWith(name, "blocks.") ? 1 + std::stoi(name.substr(7)) : stem ? 0 : layers + 1;
        const double lr = run.scalars().lr * float(std::pow(o.layer_decay(), layers + 1 - layer));
        const double decay = parameters[p].decay ? o.weight_decay() : 0;
        const std::vector<double> g = run.Gradient(p), got = run.Values(plan.master, p);
        std::vector<double> direction(g.size());
        for (size_t k = 0; k < g.size(); ++k) {
          const double momentum = matrix ? o.muon_momentum() : o.beta1();
          m[p][k] = momentum * m[p][k] + (1 - momentum) * clip * g[k];
          v[p][k] = o.beta2() * v[p][k] + (1 - o.beta2()) * clip * clip * g[k] * g[k];
          direction[k] = !matrix ? m[p][k] / (1 - std::pow(o.beta1(), t)) / (std::sqrt(v[p][k] / (1 - std::pow(o.beta2(), t))) + o.eps())
                         : o.muon_nesterov() ? (1 - momentum) * clip * g[k] + momentum * m[p][k] : m[p][k];
        }
        if (matrix) {
          ++matrices;
          const int64_t rows = parameters[p].shape[0], cols = parameters[p].shape[1];
          direction = Orthogonal(direction, rows, cols);
          for (double& d : direction) d *= 0.2 * std::sqrt(double(std::max(rows, cols)));
        }
        for (size_t k = 0; k < g.size(); ++k) {
          value[p][k] -= lr * (decay * value[p][k] + direction[k]);
          ASSERT_NEAR(got[k], value[p][k], 1e-8) << name << " step " << t;
        }
      }
    }
    EXPECT_GE(matrices, 3 * 4);
    // A step that is not finite changes nothing here either.
    const std::vector<double> before = run.Values(plan.master, 3), momentum = run.Values(plan.moments, 3);
    ForwardBackward(&run);
    run.Set(plan.gradients, plan.parameter_offset[3], NAN);
    ASSERT_TRUE(run.executor().RunUpdate().ok());
    EXPECT_EQ(run.record().skipped, 1);
    for (size_t p = 0; p < parameters.size(); ++p) {
      const std::vector<double> got = run.Values(plan.master, p);
      for (size_t k = 0; k < got.size(); ++k) ASSERT_NEAR(got[k], value[p][k], 1e-8);
    }
    EXPECT_EQ(run.Values(plan.moments, 3), momentum);
    EXPECT_EQ(run.Values(plan.master, 3), before);
  }
}

// --- The executor has no second source of truth: a plan that is changed gives other results, or none. -------------

// Loss, gradients and updated parameters of one step.
std::vector<double> Results(const Plan& plan, bool poison = true) {
  FusedRun run(plan, poison);
  run.FillParameters();
  run.FillInput(11);
  run.executor().ClearSums();
  if (!run.executor().RunForwardBackward().ok()) return {};
  std::vector<double> all = run.AllGradients();
  all.push_back(run.Loss());
  if (!run.executor().RunUpdate().ok()) return {};
  for (size_t p = 0; p < plan.table.parameters.size(); ++p) {
    const std::vector<double> values = run.Values(plan.master, p);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// In a child process, since a broken plan may read anywhere: a crash is a difference too.
bool Differs(const Plan& plan, const std::vector<double>& expected) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const std::vector<double> got = Results(plan);
    _exit(got == expected ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void ForSomePlans(const std::function<void(const Plan&, const std::vector<double>&, RandomJobs*)>& test) {
  RandomJobs jobs(71);
  for (int i = 0; i < 8; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_model()->set_drop_path_rate(0);   // a dropped branch has no say
    job.mutable_model()->set_head_dropout(0);
    job.mutable_step()->set_accumulation(1 + i % 2);
    SCOPED_TRACE(job.model().ShortDebugString());
    auto plan = Plan::Make(job, {.compute = i % 2 == 0 ? ComputeType::kF64 : ComputeType::kBF16});
    ASSERT_TRUE(plan.ok());
    const std::vector<double> expected = Results(*plan);
    ASSERT_FALSE(Differs(*plan, expected));
    test(*plan, expected, &jobs);
  }
}

TEST(FusedExecutorTest, RemovingAnOperationShows) {
  ForSomePlans([](const Plan& plan, const std::vector<double>& expected, RandomJobs* random) {
    for (int sample = 0; sample < 25; ++sample) {
      Plan changed = plan;
      std::vector<Op>& ops = sample < 23 ? changed.forward_backward : changed.update;
      const int index = sample < 23 ? random->Pick(0, int(ops.size()) - 1) : sample - 23;
      if (std::holds_alternative<Mark>(ops[index].args)) continue;   // tells times only
      ops[index].args = Cast{0, 0, 0};   // keeps its place, reads and writes, and does nothing
      EXPECT_TRUE(Differs(changed, expected)) << "without " << ops[index].name;
    }
  });
}

TEST(FusedExecutorTest, MovingATensorOntoALivingOneShows) {
  ForSomePlans([](const Plan& plan, const std::vector<double>& expected, RandomJobs* random) {
    // Read last, in the order of the operations: what may run beside others keeps its operands longer than that.
    std::vector<int> last_read(plan.tensors.size(), -1);
    for (int i = 0; i < int(plan.forward_backward.size()); ++i) {
      for (TensorId id : plan.forward_backward[i].reads) last_read[id] = i;
    }
    auto is_whole = [&](TensorId id) { return id == plan.master || id == plan.gradients || id == plan.compute || id == plan.moments; };
    for (int sample = 0; sample < 25;) {
      const TensorId a = random->Pick(0, int(plan.tensors.size()) - 1), b = random->Pick(0, int(plan.tensors.size()) - 1);
      const TensorSpec& s = plan.tensors[a];
      const TensorSpec& t = plan.tensors[b];
      if (b == plan.x || b == plan.keep_mask) continue;   // their last readers may want a part of them only
      if (a == b || s.arena != t.arena || s.arena == Arena::kPersistent || s.arena == Arena::kStaging || is_whole(a) || is_whole(b)) continue;
      if (t.offset + s.bytes > plan.arena_bytes[int(s.arena)]) continue;
      // An activation that is made while the other waits to be read.
      if (s.arena == Arena::kActivations && !(t.first < s.first && s.first <= last_read[b])) continue;
      Plan changed = plan;
      changed.tensors[a].offset = t.offset;
      EXPECT_TRUE(Differs(changed, expected)) << s.name << " moved onto " << t.name;
      ++sample;
    }
  });
}

// The operations in another order, in which none overtakes one that it shares a written byte with: what queues beside each other
// may do, and more.
std::vector<Op> Shuffled(const Plan& plan, const std::vector<Op>& ops, RandomJobs* random) {
  struct Range {
    Arena arena;
    int64_t begin, end;
    bool written;
  };
  std::vector<std::vector<Range>> ranges(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    for (const auto* list : {&ops[i].reads, &ops[i].writes}) {
      for (TensorId id : *list) {
        const TensorSpec& t = plan.tensors[id];
        ranges[i].push_back({t.arena, t.offset, t.offset + t.bytes, list == &ops[i].writes});
      }
    }
  }
  const auto meet = [&](size_t i, size_t j) {
    for (const Range& x : ranges[i]) {
      for (const Range& y : ranges[j]) {
        if ((x.written || y.written) && x.arena == y.arena && x.begin < y.end && y.begin < x.end) return true;
      }
    }
    return false;
  };
  std::vector<std::vector<int>> followers(ops.size());
  std::vector<int> waits_for(ops.size(), 0);
  for (size_t j = 0; j < ops.size(); ++j) {
    for (size_t i = 0; i < j; ++i) {
      if (meet(i, j)) followers[i].push_back(int(j)), ++waits_for[j];
    }
  }
  std::vector<int> ready;
  for (size_t i = 0; i < ops.size(); ++i) {
    if (waits_for[i] == 0) ready.push_back(int(i));
  }
  std::vector<Op> shuffled;
  while (!ready.empty()) {
    // Now the last that may go, now the first, now any: far from the plan's order.
    const int kind = random->Pick(0, 2), at = kind == 0 ? int(ready.size()) - 1 : kind == 1 ? 0 : random->Pick(0, int(ready.size()) - 1);
    const int next = ready[size_t(at)];
    ready.erase(ready.begin() + at);
    shuffled.push_back(ops[size_t(next)]);
    for (int follower : followers[size_t(next)]) {
      if (--waits_for[size_t(follower)] == 0) ready.push_back(follower);
    }
  }
  return shuffled;
}

TEST(FusedExecutorTest, AnyOrderThatDeclaredBytesAllowGivesTheSameBits) {
  RandomJobs jobs(79);
  int moved = 0;
  for (int i = 0; i < 24; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_optimizer()->set_name(i % 2 == 0 ? "muon" : "adamw");
    job.mutable_optimizer()->set_ema_decay(i % 3 == 0 ? 0.9 : 0);
    job.mutable_optimizer()->set_layer_decay(i % 4 < 2 ? 0.7 : 1.0);
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    const auto plan = Plan::Make(job, {.compute = i % 3 == 1 ? ComputeType::kF64 : i % 3 == 2 ? ComputeType::kF32 : ComputeType::kBF16});
    ASSERT_TRUE(plan.ok()) << plan.status();
    const std::vector<double> expected = Results(*plan, false);
    ASSERT_FALSE(expected.empty());
    for (int turn = 0; turn < 3; ++turn) {
      Plan changed = *plan;
      changed.forward_backward = Shuffled(*plan, plan->forward_backward, &jobs);
      changed.update = Shuffled(*plan, plan->update, &jobs);
      ASSERT_EQ(changed.forward_backward.size(), plan->forward_backward.size());
      ASSERT_EQ(changed.update.size(), plan->update.size());
      for (size_t k = 0; k < plan->update.size(); ++k) moved += changed.update[k].name != plan->update[k].name;
      ASSERT_TRUE(Results(changed, false) == expected);
    }
  }
  EXPECT_GT(moved, 500);
}

TEST(FusedExecutorTest, UndeclaredAccessIsAnError) {
  RandomJobs jobs(73);
  auto plan = Plan::Make(jobs.Next(), {});
  ASSERT_TRUE(plan.ok());
  plan->forward_backward[3].reads.clear();
  FusedRun run(*plan, true);
  EXPECT_TRUE(absl::StrContains(run.executor().RunForwardBackward().ToString(), "does not declare"));
}

TEST(FusedExecutorTest, TheFusedEngineLoadsNoLibTorch) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    EXPECT_FALSE(absl::StrContains(line, "libtorch") || absl::StrContains(line, "libc10")) << line;
  }
}

}  // namespace
}  // namespace hierad
