// For tests of the fused step: fills a plan's inputs and parameters with random values and runs it.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "base/plan/plan.h"
#include "base/random.h"
#include "worker/step/fused_executor.h"
#include "worker/step/fused_op_cpu.h"

namespace hierad {

class FusedRun {
 public:
  FusedRun(Plan the_plan, bool poison) {
    auto executor = FusedExecutor::Make(std::move(the_plan), {.poison = poison});
    EXPECT_TRUE(executor.ok()) << executor.status();
    executor_ = *std::move(executor);
    scalars().seed = 7;
    scalars().step = 1;
    scalars().epoch = 3;
    scalars().mask_draw = uint32_t(Draw::kMask);
    scalars().real = int32_t(plan().batch);
    scalars().train = 1;
    scalars().lr = 1e-2;
    if (plan().options.compute == ComputeType::kF16) record().scale = {1024, 0};
    scalars().loss_weight = 1.0 / double(LossElements() * plan().batch);
  }

  FusedExecutor& executor() { return *executor_; }
  const Plan& plan() const { return executor_->plan(); }
  StepScalars& scalars() { return *executor_->Get<StepScalars>(plan().scalars); }
  StepRecord& record() { return *executor_->Get<StepRecord>(plan().record); }
  bool is_double() const { return plan().options.compute == ComputeType::kF64; }

  int64_t LossElements() const {
    const Geometry& g = plan().geometry;
    if (g.spec.task() != "mae") return 1;
    return (g.num_mask_units - g.num_kept) * g.mask_unit_final_tokens * g.pred_dim;
  }

  // Parameter i of the table has its own numbers, whatever the plan's order: the same values in every plan of a model.
  void FillParameters() {
    for (size_t p = 0; p < plan().table.parameters.size(); ++p) {
      std::mt19937 random(uint32_t(100 + p));
      const Parameter& parameter = plan().table.parameters[p];
      const bool gamma = parameter.init == Init::kOne;
      for (int64_t i = 0; i < parameter.size; ++i) Set(plan().master, plan().parameter_offset[p] + i, (gamma ? 1 : 0) + 0.4 * Unit(&random));
    }
    RefreshCompute();
  }
  void FillInput(uint32_t seed) {
    std::mt19937 random(seed);
    const Plan& p = plan();
    const int64_t rows = p.batch, values = rows * p.options.rows.rules.channels * p.options.rows.rules.samples;
    for (int64_t i = 0; i < values; ++i) {
      switch (p.options.rows.type) {
        case DType::kU8: executor_->Get<uint8_t>(p.source)[i] = uint8_t(random()); break;
        case DType::kI16: executor_->Get<int16_t>(p.source)[i] = int16_t(random()); break;
        case DType::kF16: executor_->Get<uint16_t>(p.source)[i] = uint16_t((random() & 0x83FF) | (12 + random() % 5) << 10); break;   // 1/8 to 4
        default: executor_->Get<float>(p.source)[i] = float(2 * Unit(&random)); break;
      }
    }
    for (int64_t b = 0; b < rows; ++b) {
      executor_->Get<int64_t>(p.source_ids)[b] = int64_t(random() % 1000);
      executor_->Get<int64_t>(p.source_labels)[b] = int64_t(random() % std::max(1, p.geometry.spec.num_classes()));
    }
  }

  void RefreshCompute() { RefreshComputeCopyOnCpu(executor_->addresses()); }
  double Loss() const {
    double sum = 0;
    for (int64_t i = 0; i < plan().losses(); ++i) sum += executor_->Get<double>(plan().loss_partials)[i];
    return sum * executor_->Get<StepScalars>(plan().scalars)->loss_weight;
  }
  double At(TensorId id, int64_t i) const { return is_double() ? executor_->Get<double>(id)[i] : double(executor_->Get<float>(id)[i]); }
  void Set(TensorId id, int64_t i, double value) {
    if (is_double()) {
      executor_->Get<double>(id)[i] = value;
    } else {
      executor_->Get<float>(id)[i] = float(value);
    }
  }
  // Of parameter `p` of the table.
  std::vector<double> Values(TensorId flat, size_t p) const {
    std::vector<double> values(plan().table.parameters[p].size);
    for (size_t i = 0; i < values.size(); ++i) values[i] = At(flat, plan().parameter_offset[p] + int64_t(i));
    return values;
  }
  std::vector<double> Gradient(size_t p) const { return Values(plan().gradients, p); }
  std::vector<double> AllGradients() const {
    std::vector<double> all;
    for (size_t p = 0; p < plan().table.parameters.size(); ++p) {
      const std::vector<double> one = Gradient(p);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

 private:
    static double Unit(std::mt19937* random) { return double((*random)()) / 2147483648.0 - 1; }

  std::unique_ptr<FusedExecutor> executor_;
};

}  // namespace hierad
