#include "worker/step/staging.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/draws.h"

namespace hierad {

Staging::Staging(const Geometry& geometry, const v1::JobSpec& spec, const Accelerator& accelerator)
    : geometry_(geometry), spec_(spec), accelerator_(accelerator) {
  x_shape_ = {spec.step().batch_per_rank(), geometry.spec.in_chans()};
  x_shape_.insert(x_shape_.end(), geometry.input_size.begin(), geometry.input_size.end());
  const bool cpu = accelerator.device().is_cpu();
  for (int i = 0; i < (cpu ? 1 : std::max(1, spec.step().accumulation())); ++i) host_.push_back(Allocate(true));
  if (!cpu) {
    device_ = Allocate(false);
    device_.x = at::zeros(x_shape_, at::TensorOptions().device(accelerator.device()));
  }
}

BatchTensors Staging::Allocate(bool on_host) const {
  auto make = [&](at::IntArrayRef shape, at::ScalarType type) {
    return (on_host ? accelerator_.HostBuffer(shape, type)
                    : at::empty(shape, at::TensorOptions().device(accelerator_.device()).dtype(type)))
        .zero_();
  };
  const int64_t B = x_shape_[0];
  BatchTensors tensors;
  tensors.units = make({B, geometry_.num_mask_units}, at::kLong);
  tensors.rank = make({B, geometry_.num_mask_units}, at::kLong);
  tensors.labels = make({B}, at::kLong);
  tensors.weight = make({B}, at::kFloat);
  if (geometry_.spec.drop_path_rate() > 0) {
    tensors.drop_path = make({2 * int64_t(geometry_.blocks.size()), B}, at::kFloat);
  }
  if (geometry_.spec.task() == "classify" && geometry_.spec.head_dropout() > 0) {
    tensors.dropout = make({B, geometry_.encoder_dim_out}, at::kFloat);
  }
  return tensors;
}

absl::Status Staging::Fill(const MicroBatch& batch, Use use, double weight, int64_t rows,
                           const BatchTensors& host) const {
  const Geometry& g = geometry_;
  const int64_t n = g.num_mask_units;
  const bool classify = g.spec.task() == "classify";
  const Draw purpose = use == Use::kTrain ? Draw::kMask : Draw::kEvalMask;
  const uint32_t epoch = use == Use::kTrain ? batch.epoch : 0;
  for (int64_t row = 0; row < rows; ++row) {
    const bool real = row < batch.real;
    const uint64_t visit = real ? batch.visit_ids_B[row] : 0;
    int64_t* units = host.units.mutable_data_ptr<int64_t>() + row * n;
    int64_t* rank = host.rank.mutable_data_ptr<int64_t>() + row * n;
    if (classify || use == Use::kFeatures) {
      KeepAllMaskUnits(n, units, rank);
    } else {
      DrawMaskUnits({spec_.seed(), purpose, epoch, visit}, n, g.num_kept, units, rank);
    }
    host.weight.mutable_data_ptr<float>()[row] = real ? float(weight) : 0.0f;
    if (use == Use::kTrain && host.drop_path.defined()) {
      DrawDropPath(spec_.seed(), epoch, visit, g, host.drop_path.mutable_data_ptr<float>() + row, x_shape_[0]);
    }
    if (use == Use::kTrain && host.dropout.defined()) {
      DrawDropout(spec_.seed(), epoch, visit, g.spec.head_dropout(), g.encoder_dim_out,
                  host.dropout.mutable_data_ptr<float>() + row * g.encoder_dim_out);
    }
    if (classify && use != Use::kFeatures) {
      const int64_t label = real ? batch.labels_B[row] : 0;
      if (label < 0 || label >= g.spec.num_classes()) {
        return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("sample visit ", visit, " has label ", label,
                                                           "; model.num_classes ", g.spec.num_classes(), " allows 0 to ",
                                                           g.spec.num_classes() - 1, "."));
      }
      host.labels.mutable_data_ptr<int64_t>()[row] = label;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<BatchTensors> Staging::Load(int micro_batch, const MicroBatch& batch, Use use, double weight,
                                           int64_t rows) {
  const bool cpu = accelerator_.device().is_cpu();
  const BatchTensors& host = host_[micro_batch % host_.size()];
  RETURN_IF_ERROR(Fill(batch, use, weight, rows, host));
  const BatchTensors& target = cpu ? host : device_;
  std::vector<int64_t> shape = x_shape_;
  shape[0] = rows;
  const at::Tensor x = at::from_blob(const_cast<float*>(batch.x_BCS), shape);
  BatchTensors tensors;
  auto take = [&](const at::Tensor& from, const at::Tensor& to, int64_t axis) {
    if (!from.defined()) return at::Tensor();
    if (!cpu) to.copy_(from, /*non_blocking=*/true);
    return rows == x_shape_[0] ? to : to.narrow(axis, 0, rows);
  };
  tensors.units = take(host.units, target.units, 0);
  tensors.rank = take(host.rank, target.rank, 0);
  tensors.labels = take(host.labels, target.labels, 0);
  tensors.weight = take(host.weight, target.weight, 0);
  if (use == Use::kTrain) {
    tensors.drop_path = take(host.drop_path, target.drop_path, 1);
    tensors.dropout = take(host.dropout, target.dropout, 0);
  }
  if (cpu) {
    tensors.x = x;
  } else {
    at::Tensor on_device = device_.x.narrow(0, 0, rows);
    on_device.copy_(x, /*non_blocking=*/true);
    tensors.x = rows == x_shape_[0] ? device_.x : on_device;
  }
  return tensors;
}

}  // namespace hierad
