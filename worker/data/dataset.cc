#include "worker/data/dataset.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "base/status.h"
#include "worker/data/image_dataset.h"
#include "worker/data/signal_dataset.h"
#include "worker/data/signal_source.h"

namespace hierad {
namespace {

// Normal numbers: each sample is a window at its own place of one fixed table, so that making it costs a copy and a
// benchmark measures the step, not the generator.
class Synthetic : public Dataset {
 public:
  Synthetic(const v1::DataSpec& data, const Geometry& geometry)
      : count_(data.synthetic_samples()), num_classes_(geometry.spec.task() == "classify" ? geometry.spec.num_classes() : 0),
        size_(std::accumulate(geometry.input_size.begin(), geometry.input_size.end(), int64_t{geometry.spec.in_chans()}, std::multiplies<>())),
        table_(kTableSize) {
    const RandomStream draws{0, Draw::kSynthetic, 0, 0};
    for (uint32_t i = 0; i < kTableSize; i += 2) {   // Box-Muller
      const double radius = std::sqrt(-2 * std::log(1 - double{draws.Uniform(i)})), angle = 2 * std::numbers::pi * draws.Uniform(i + 1);
      table_[i] = static_cast<float>(radius * std::cos(angle));
      table_[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
  }
  int64_t count() const override { return count_; }
  int64_t num_classes() const override { return num_classes_; }
  std::string class_name(int64_t label) const override { return absl::StrCat(label); }
  int64_t label(uint64_t sample) const override { return num_classes_ ? static_cast<int64_t>(sample % num_classes_) : -1; }
  std::string SampleName(uint64_t sample) const override { return absl::StrCat("synthetic sample ", sample); }
  std::string Describe() const override { return absl::StrCat("synthetic: ", count_, " samples of ", size_, " normal numbers"); }
  absl::Status Read(const Visit& visit, float* x_CS) const override {
    uint32_t at = RandomStream{visit.seed, Draw::kSynthetic, 1, visit.sample}.Word(0) % kTableSize;
    for (int64_t done = 0; done < size_;) {
      const int64_t run = std::min<int64_t>(size_ - done, kTableSize - at);
      std::copy_n(table_.data() + at, run, x_CS + done);
      done += run;
      at = 0;
    }
    return absl::OkStatus();
  }

 private:
  static constexpr uint32_t kTableSize = 1 << 20;
  const int64_t count_, num_classes_, size_;
  std::vector<float> table_;
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

absl::StatusOr<std::unique_ptr<Dataset>> OpenDataset(const v1::DataSpec& data, const std::string& path,
                                                     const Geometry& geometry, ChannelStatistics* statistics, Subset subset) {
  auto dataset = Open(data, path, geometry, statistics, subset);
  // What the system refuses to open is the data's fault, like what cannot be understood.
  if (absl::IsNotFound(dataset.status()) || absl::IsPermissionDenied(dataset.status()) || absl::IsInternal(dataset.status()))
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path: ", dataset.status().message()));
  return dataset;
}

}  // namespace hierad
