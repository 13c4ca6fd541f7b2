#include "worker/step/staging.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/draws.h"

namespace hierad {

Staging::Staging(const Geometry& geometry, const v1::JobSpec& spec, const RowFormat& rows, Accelerator* accelerator)
    : geometry_(geometry), spec_(spec), format_(RowFormat::Or(rows, geometry)), accelerator_(*accelerator) {
  x_shape_ = {spec.step().batch_per_rank(), geometry.spec.in_chans()};
  x_shape_.insert(x_shape_.end(), geometry.input_size.begin(), geometry.input_size.end());
  const bool cpu = accelerator_.device().is_cpu();
  for (int i = 0; i < (cpu ? 1 : std::max(1, spec.step().accumulation())); ++i) {
    host_.push_back(Allocate(true));
    host_rows_.push_back(AllocateRows(true));
  }
  if (!cpu) {
    device_ = Allocate(false);
    device_rows_ = AllocateRows(false);
  }
  const auto on_device = at::TensorOptions().device(accelerator_.device());
  device_.x = at::zeros(x_shape_, on_device);
  not_finite_ = at::zeros({1}, on_device.dtype(at::kLong));
  auto constants = [&](const std::vector<float>& values) {
    return at::from_blob(const_cast<float*>(values.data()), {int64_t(values.size())}).to(on_device.dtype(at::kFloat), /*non_blocking=*/false, /*copy=*/true);
  };
  offset_ = constants(format_.offset);
  scale_ = constants(format_.scale);
}

Staging::RowTensors Staging::AllocateRows(bool on_host) const {
  auto make = [&](int64_t size, at::ScalarType type) {
    return on_host ? accelerator_.HostBuffer({size}, type) : at::empty({size}, at::TensorOptions().device(accelerator_.device()).dtype(type));
  };
  RowTensors tensors{{}, make(x_shape_[0], at::kLong), make(sizeof(StepScalars), at::kByte)};
  if (!on_host) tensors.rows = make(x_shape_[0] * format_.row_bytes(), at::kByte);
  return tensors;
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

// Into device_.x. On a GPU the copies are of stored bytes, in the order of the stream.
void Staging::Convert(int set, const MicroBatch& batch, Use use, int64_t rows) {
  const bool cpu = accelerator_.device().is_cpu();
  const RowTensors& host = host_rows_[set];
  StepScalars scalars{};
  scalars.seed = spec_.seed(), scalars.real = batch.real, scalars.train = use == Use::kTrain ? 1 : 0;
  scalars.epoch = use == Use::kTrain ? batch.epoch : 0;
  std::memcpy(host.scalars.mutable_data_ptr(), &scalars, sizeof scalars);
  std::memcpy(host.ids.mutable_data_ptr(), batch.visit_ids_B, batch.real * sizeof(int64_t));
  const void* source = batch.x_BCS;
  if (!cpu) {
    device_rows_.ids.copy_(host.ids, /*non_blocking=*/true);
    device_rows_.scalars.copy_(host.scalars, /*non_blocking=*/true);
    const int64_t bytes = batch.real * format_.row_bytes();
    device_rows_.rows.narrow(0, 0, bytes).copy_(at::from_blob(const_cast<void*>(source), {bytes}, at::kByte), /*non_blocking=*/true);
    source = device_rows_.rows.const_data_ptr();
  }
  const RowTensors& from = cpu ? host : device_rows_;
  accelerator_.ConvertRows({static_cast<const StepScalars*>(from.scalars.const_data_ptr()), source, format_.type, from.ids.const_data_ptr<int64_t>(), nullptr,
                            offset_.const_data_ptr<float>(), scale_.const_data_ptr<float>(), device_.x.mutable_data_ptr<float>(), nullptr, nullptr,
                            reinterpret_cast<uint64_t*>(not_finite_.mutable_data_ptr<int64_t>()), rows, format_.rules});
}

absl::StatusOr<BatchTensors> Staging::Load(int micro_batch, const MicroBatch& batch, Use use, double weight,
                                           int64_t rows) {
  const bool cpu = accelerator_.device().is_cpu();
  const int set = micro_batch % int(host_.size());
  const BatchTensors& host = host_[set];
  RETURN_IF_ERROR(Fill(batch, use, weight, rows, host));
  Convert(set, batch, use, rows);
  const BatchTensors& target = cpu ? host : device_;
  BatchTensors tensors;
  auto narrowed = [&](const at::Tensor& whole, int64_t axis) { return rows == x_shape_[0] ? whole : whole.narrow(axis, 0, rows); };
  auto take = [&](const at::Tensor& from, const at::Tensor& to, int64_t axis) {
    if (!from.defined()) return at::Tensor();
    if (!cpu) to.copy_(from, /*non_blocking=*/true);
    return narrowed(to, axis);
  };
  tensors.units = take(host.units, target.units, 0);
  tensors.rank = take(host.rank, target.rank, 0);
  tensors.labels = take(host.labels, target.labels, 0);
  tensors.weight = take(host.weight, target.weight, 0);
  if (use == Use::kTrain) {
    tensors.drop_path = take(host.drop_path, target.drop_path, 1);
    tensors.dropout = take(host.dropout, target.dropout, 0);
  }
  tensors.x = narrowed(device_.x, 0);
  return tensors;
}

}  // namespace hierad
