#include "worker/data/dataset.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/data/image_dataset.h"
#include "worker/data/signal_dataset.h"
#include "worker/data/signal_source.h"
#include "worker/kernels/reference/input.h"

namespace hierad {
namespace {

// Random numbers, which the step draws where it runs (RowRules::synthetic): nothing is made, read or copied here.
class Synthetic : public Dataset {
 public:
  Synthetic(const v1::DataSpec& data, const Geometry& geometry)
      : count_(data.synthetic_samples()), num_classes_(geometry.spec.task() == "classify" ? geometry.spec.num_classes() : 0),
        format_(RowFormat::Plain(geometry)) {
    format_.rules.synthetic = count_;
  }
  int64_t count() const override { return count_; }
  int64_t num_classes() const override { return num_classes_; }
  std::string class_name(int64_t label) const override { return absl::StrCat(label); }
  int64_t label(uint64_t sample) const override { return num_classes_ ? static_cast<int64_t>(sample % num_classes_) : -1; }
  std::string SampleName(uint64_t sample) const override { return absl::StrCat("synthetic sample ", sample); }
  std::string Describe() const override { return absl::StrCat("synthetic: ", count_, " samples of ", format_.rules.channels * format_.rules.samples, " random numbers, drawn by the step"); }
  const RowFormat& row_format() const override { return format_; }
  absl::Status ReadRow(const Visit&, void*) const override { return absl::OkStatus(); }

 private:
  const int64_t count_, num_classes_;
  RowFormat format_;
};

class PreparedDataset : public Dataset {
 public:
  explicit PreparedDataset(std::shared_ptr<const Dataset> dataset) : dataset_(std::move(dataset)), format_(dataset_->row_format()) {
    format_.type = DType::kF32;
    std::fill(format_.offset.begin(), format_.offset.end(), 0.0f);
    std::fill(format_.scale.begin(), format_.scale.end(), 1.0f);
    format_.rules.points = format_.rules.samples;
    format_.rules.clip = 0, format_.rules.synthetic = 0;
  }
  int64_t count() const override { return dataset_->count(); }
  int64_t num_classes() const override { return dataset_->num_classes(); }
  std::string class_name(int64_t label) const override { return dataset_->class_name(label); }
  int64_t label(uint64_t sample) const override { return dataset_->label(sample); }
  std::string SampleName(uint64_t sample) const override { return dataset_->SampleName(sample); }
  std::string Describe() const override { return absl::StrCat(dataset_->Describe(), ", prepared on the host"); }
  int64_t bytes_read() const override { return dataset_->bytes_read(); }
  std::vector<std::pair<std::string, double>> stages() const override { return dataset_->stages(); }
  absl::Status NotFinite(uint64_t sample) const override { return dataset_->NotFinite(sample); }
  const RowFormat& row_format() const override { return format_; }
  absl::Status ReadRow(const Visit& visit, void* row) const override {
    const std::unique_ptr<std::byte[]> stored(new std::byte[dataset_->row_format().row_bytes()]);
    RETURN_IF_ERROR(dataset_->ReadRow(visit, stored.get()));
    ConvertRow(dataset_->row_format(), stored.get(), visit, /*draws=*/false, static_cast<float*>(row));
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<const Dataset> dataset_;
  RowFormat format_;
};

absl::StatusOr<std::unique_ptr<Dataset>> Open(const v1::DataSpec& data, const std::string& path, const Geometry& geometry,
                                              ChannelStatistics* statistics, Subset subset) {
  const std::string& source = data.source();
  if (source == "synthetic") {
    if (data.synthetic_samples() < 1)
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.synthetic_samples is ", data.synthetic_samples(), "; at least 1 is needed"));
    return std::make_unique<Synthetic>(data, geometry);
  }
  if (path.empty()) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path is not set; source ", source, " needs it"));
  if (path.find('\0') != std::string::npos) return ErrorOf(v1::REASON_USER_ERROR, "data.path holds a NUL byte");
  if (source == "images") return OpenImageFolder(data, path, geometry);
  absl::StatusOr<std::unique_ptr<SignalSource>> signals =
      source == "ts"    ? OpenTs(path, data)
      : source == "npy" ? OpenNpy(path, geometry.dims, geometry.spec.in_chans())
                      : source == "edf" ? OpenRecordings(data, path, geometry, subset)
                        : ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.source '", source, "' is none of ts, npy, edf, images, synthetic"));
  RETURN_IF_ERROR(signals.status());
  return MakeSignalDataset(*std::move(signals), data, path, geometry, statistics);
}

}  // namespace

const RowFormat& Dataset::row_format() const {
  static const RowFormat& plain = *new RowFormat;
  return plain;
}

absl::Status Dataset::NotFinite(uint64_t sample) const {
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(SampleName(sample), ": a value is not finite, or beyond fp32 once it is scaled"));
}

absl::Status Dataset::Read(const Visit& visit, float* x_CS) const {
  if (row_format().rules.samples == 0) return ErrorOf(v1::REASON_INTERNAL, "a data set without a row format was asked for a sample.");
  const std::unique_ptr<std::byte[]> row(new std::byte[row_format().row_bytes()]);
  RETURN_IF_ERROR(ReadRow(visit, row.get()));
  return ConvertRow(row_format(), row.get(), visit, visit.augment, x_CS) ? absl::OkStatus() : NotFinite(visit.sample);
}

bool ConvertRow(const RowFormat& format, const void* row, const Visit& visit, bool draws, float* x_CS) {
  StepScalars scalars{};
  scalars.seed = visit.seed, scalars.epoch = visit.epoch, scalars.real = 1, scalars.train = draws ? 1 : 0;
  const auto id = static_cast<int64_t>(visit.id);
  uint64_t not_finite = 0;
  reference::ConvertInput<float>({&scalars, row, format.type, &id, nullptr, format.offset.data(), format.scale.data(), x_CS, nullptr, nullptr, &not_finite, 1, format.rules});
  return not_finite == 0;
}

std::unique_ptr<Dataset> PreparedRows(std::shared_ptr<const Dataset> dataset) { return std::make_unique<PreparedDataset>(std::move(dataset)); }

absl::StatusOr<std::unique_ptr<Dataset>> OpenDataset(const v1::DataSpec& data, const std::string& path,
                                                     const Geometry& geometry, ChannelStatistics* statistics, Subset subset) {
  auto dataset = Open(data, path, geometry, statistics, subset);
  // What the system refuses to open is the data's fault, like what cannot be understood.
  if (absl::IsNotFound(dataset.status()) || absl::IsPermissionDenied(dataset.status()) || absl::IsInternal(dataset.status()))
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path: ", dataset.status().message()));
  return dataset;
}

}  // namespace hierad
