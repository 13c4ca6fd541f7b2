#include "worker/data/signal_dataset.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/random.h"
#include "base/status.h"

namespace hierad {
namespace {

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint16_t kHalfInfinityBits = 0x7C00u;

// Magnitudes compare as their bits do.
template <typename Bits>
bool IsFinite(const Bits* x, int64_t size, Bits infinity) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() / 2;
  Bits largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, static_cast<Bits>(x[i] & kMagnitude));
  return largest < infinity;
}

int64_t Product(const std::vector<int64_t>& axes) {
  return std::accumulate(axes.begin(), axes.end(), int64_t{1}, std::multiplies<>());
}

struct Moments {
  double mean = 0, std = 1;
};

// Population mean and standard deviation. A constant signal keeps std 1: it becomes zeros, not NaN.
Moments MomentsOf(const float* x, int64_t size) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i];
  const double mean = sum / size;
  for (int64_t i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double std = std::sqrt(squares / size);
  return {mean, std > 0 ? std : 1};
}

// First point of the crop of `points` points to `wanted`.
int64_t CropStart(const v1::DataSpec& data, const Visit& visit, int64_t points, int64_t wanted) {
  if (points <= wanted || data.crop() == "start") return 0;
  if (data.crop() == "random" && visit.augment) {
    const RandomStream draws{visit.seed, Draw::kSignalCrop, visit.epoch, visit.id};
    return std::min(points - wanted, static_cast<int64_t>(double{draws.Uniform(0)} * static_cast<double>(points - wanted + 1)));
  }
  return (points - wanted) / 2;
}

thread_local int64_t read_here_ns = 0;   // of this thread's reads: what a whole read took less this is preparation

class SignalDataset : public Dataset {
 public:
  SignalDataset(std::unique_ptr<SignalSource> source, const v1::DataSpec& data, const Geometry& geometry)
      : source_(std::move(source)), data_(data), pool_(std::max(1, data.mean_pool())), points_in_(Product(source_->axes())),
        points_pooled_((points_in_ + pool_ - 1) / pool_), points_out_(Product(geometry.input_size)), points_kept_(std::min(points_pooled_, points_out_)),
        finite_(source_->always_finite()), windowed_(data.normalize() == "window"),
        on_host_(pool_ > 1 || windowed_ || (!finite_ && (data.missing() == "zero" || data.missing() == "hold"))),
        looks_(!finite_ && data.on_error() == "skip") {
    format_ = RowFormat::Plain(geometry);
    if (!on_host_) format_.type = source_->row_type();
    RowRules& rules = format_.rules;
    if (data.pad() != "edge") rules.points = points_kept_;
    if (data.has_clip() && !windowed_) rules.clip = static_cast<float>(data.clip());
    rules.shift = data.shift();
    rules.channel_drop = data.channel_drop();
    if (data.amplitude_size() == 2) rules.amplitude_least = data.amplitude(0), rules.amplitude_most = data.amplitude(1);
    if (data.has_scale() && data.normalize() != "channel" && !windowed_) std::fill(format_.scale.begin(), format_.scale.end(), static_cast<float>(1 / data.scale()));
  }

  int64_t count() const override { return source_->count(); }
  int64_t num_classes() const override { return source_->num_classes(); }
  std::string class_name(int64_t label) const override { return source_->class_name(label); }
  int64_t label(uint64_t sample) const override { return source_->label(sample); }
  std::string SampleName(uint64_t sample) const override { return source_->SampleName(sample); }
  int64_t bytes_read() const override { return bytes_; }
  const RowFormat& row_format() const override { return format_; }
  std::vector<std::pair<std::string, double>> stages() const override { return {{"read", double(read_ns_) / 1e9}, {"prepare", double(prepare_ns_) / 1e9}}; }
  std::string Describe() const override {
    return absl::StrCat(source_->Describe(), ": ", count(), " samples, ", source_->channels(), " channels of ",
                        absl::StrJoin(source_->axes(), "x"), " points", pool_ > 1 ? absl::StrCat(", mean of every ", pool_) : "",
                        points_kept_ < points_pooled_ ? absl::StrCat(", cropped (", data_.crop(), ") from ", points_pooled_, " to ", points_kept_) : "",
                        ", normalize ", data_.normalize().empty() ? "none" : data_.normalize(),
                        points_out_ > points_pooled_ ? absl::StrCat(", padded (", data_.pad(), ") from ", points_pooled_, " to ", points_out_) : "",
                        ", rows ", RowTypeName(format_.type), num_classes() ? absl::StrCat(", ", num_classes(), " classes") : "");
  }

  absl::Status ReadRow(const Visit& visit, void* row) const override {
    const auto begin = Clock::System().Monotonic();
    const int64_t read_before = read_here_ns;
    const absl::Status status = on_host_ ? PrepareOnHost(visit, static_cast<float*>(row)) : TakeStored(visit, static_cast<std::byte*>(row));
    prepare_ns_.fetch_add((Clock::System().Monotonic() - begin).count() - (read_here_ns - read_before), std::memory_order_relaxed);
    return status;
  }

  absl::Status NotFinite(uint64_t sample) const override {
    std::vector<float> raw(source_->channels() * points_in_);
    RETURN_IF_ERROR(ReadRaw(sample, raw.data()));
    return Dataset::NotFinite(sample);   // scaled beyond fp32
  }

  // Mean and standard deviation of each channel over all samples and points, merged sample by sample (Chan et al.).
  absl::StatusOr<ChannelStatistics> ComputeStatistics() const {
    const int64_t channels = source_->channels();
    std::vector<double> mean(channels, 0), squares(channels, 0);
    std::vector<float> pooled_CT;
    double n = 0;
    for (int64_t sample = 0; sample < count(); ++sample) {
      const absl::Status read = ReadPooled(sample, &pooled_CT);
      if (read.ok()) Clip(pooled_CT.data(), pooled_CT.size());
      if (!read.ok() && data_.on_error() == "skip") continue;   // the loader counts it
      RETURN_IF_ERROR(read);
      const double m = points_pooled_;
      for (int64_t c = 0; c < channels; ++c) {
        const float* x = pooled_CT.data() + c * points_pooled_;
        double sum = 0, own_squares = 0;
        for (int64_t t = 0; t < points_pooled_; ++t) sum += x[t];
        const double own_mean = sum / m, delta = own_mean - mean[c];
        for (int64_t t = 0; t < points_pooled_; ++t) own_squares += (x[t] - own_mean) * (x[t] - own_mean);
        mean[c] += delta * m / (n + m);
        squares[c] += own_squares + delta * delta * n * m / (n + m);
      }
      n += m;
    }
    if (n == 0) return ErrorOf(v1::REASON_DATA_ERROR, "not one sample of the training set can be read");
    ChannelStatistics statistics;
    for (int64_t c = 0; c < channels; ++c) {
      const double std = std::sqrt(squares[c] / n);
      statistics.mean.push_back(mean[c]);
      statistics.std.push_back(std > 0 ? std : 1);
    }
    return statistics;
  }

  void Use(const ChannelStatistics& statistics) {
    for (size_t c = 0; c < statistics.mean.size(); ++c) {
      format_.offset[c] = static_cast<float>(statistics.mean[c]);
      format_.scale[c] = static_cast<float>(1 / statistics.std[c]);
    }
  }

 private:
  // Means, windows' own moments and missing values need the whole sample as numbers.
  absl::Status PrepareOnHost(const Visit& visit, float* x_CS) const {
    std::vector<float> pooled_CT;
    RETURN_IF_ERROR(ReadPooled(visit.sample, &pooled_CT));
    const int64_t start = CropStart(data_, visit, points_pooled_, points_out_);
    for (int64_t c = 0; c < source_->channels(); ++c) {
      float* out = x_CS + c * points_out_;
      std::copy_n(pooled_CT.data() + c * points_pooled_ + start, points_kept_, out);
      if (windowed_) NormaliseWindow(out);
      Pad(reinterpret_cast<std::byte*>(out));
    }
    return absl::OkStatus();
  }

  // The points that count, as they are stored, one channel behind the other; then to their places.
  absl::Status TakeStored(const Visit& visit, std::byte* row) const {
    const int64_t start = CropStart(data_, visit, points_pooled_, points_out_), channels = source_->channels(), size = SizeOf(format_.type);
    // Whether a sample is left out must not depend on the crop: a resumed run would decide otherwise.
    if (looks_ && points_kept_ < points_in_) {
      const std::unique_ptr<std::byte[]> whole(new std::byte[channels * points_in_ * size]);
      RETURN_IF_ERROR(ReadStored(visit.sample, 0, points_in_, whole.get()));
      for (int64_t c = 0; c < channels; ++c) std::memcpy(row + c * points_out_ * size, whole.get() + (c * points_in_ + start) * size, points_kept_ * size);
    } else {
      RETURN_IF_ERROR(ReadStored(visit.sample, start, points_kept_, row));
      if (points_kept_ < points_out_)
        for (int64_t c = channels - 1; c > 0; --c) std::memmove(row + c * points_out_ * size, row + c * points_kept_ * size, points_kept_ * size);
    }
    if (points_kept_ < points_out_)
      for (int64_t c = 0; c < channels; ++c) Pad(row + c * points_out_ * size);
    return absl::OkStatus();
  }

  absl::Status ReadStored(uint64_t sample, int64_t first, int64_t points, std::byte* row) const {
    RETURN_IF_ERROR(Timed(points, [&] { return source_->ReadRow(sample, first, points, row); }));
    if (!looks_) return absl::OkStatus();
    const int64_t values = source_->channels() * points;
    const bool finite = format_.type == DType::kF16 ? IsFinite(reinterpret_cast<const uint16_t*>(row), values, kHalfInfinityBits)
                                                    : IsFinite(reinterpret_cast<const uint32_t*>(row), values, kInfinityBits);
    return finite ? absl::OkStatus() : NotFinite(sample);
  }

  // Behind the points of one channel.
  void Pad(std::byte* channel) const {
    const int64_t size = SizeOf(format_.type), missing = points_out_ - points_kept_;
    if (data_.pad() == "edge")
      for (int64_t i = 0; i < missing; ++i) std::memcpy(channel + (points_kept_ + i) * size, channel + (points_kept_ - 1) * size, size);
    else std::memset(channel + points_kept_ * size, 0, missing * size);
  }

  void Clip(float* x, int64_t size) const {
    if (!data_.has_clip()) return;
    const float most = static_cast<float>(data_.clip());
    for (int64_t i = 0; i < size; ++i) x[i] = std::clamp(x[i], -most, most);
  }

  void NormaliseWindow(float* x) const {
    Clip(x, points_kept_);
    const Moments moments = MomentsOf(x, points_kept_);
    for (int64_t t = 0; t < points_kept_; ++t) x[t] = static_cast<float>((x[t] - moments.mean) / moments.std);
  }

  // A read of so many points of each channel, its time and bytes counted.
  template <typename Read>
  absl::Status Timed(int64_t points, const Read& read) const {
    const auto begin = Clock::System().Monotonic();
    const absl::Status status = read();
    const int64_t took = (Clock::System().Monotonic() - begin).count();
    read_here_ns += took;
    read_ns_.fetch_add(took, std::memory_order_relaxed);
    if (status.ok()) bytes_.fetch_add(points == points_in_ ? source_->sample_bytes() : source_->sample_bytes() / points_in_ * points, std::memory_order_relaxed);
    return status;
  }

  absl::Status ReadRaw(uint64_t sample, float* x_CT) const {
    RETURN_IF_ERROR(Timed(points_in_, [&] { return source_->Read(sample, x_CT); }));
    if (finite_ || IsFinite(reinterpret_cast<const uint32_t*>(x_CT), source_->channels() * points_in_, kInfinityBits)) return absl::OkStatus();
    return Mend(sample, x_CT);
  }

  // Missing values as data.missing says; what else is not finite is refused.
  absl::Status Mend(uint64_t sample, float* x_CT) const {
    const bool mends = data_.missing() == "zero" || data_.missing() == "hold";
    for (int64_t i = 0; i < source_->channels() * points_in_; ++i) {
      if (std::isfinite(x_CT[i])) continue;
      if (!mends || !std::isnan(x_CT[i]))
        return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(source_->SampleName(sample), ": value ", x_CT[i], " at channel ", i / points_in_, ", point ", i % points_in_,
                                                           "; only finite fp32 values are read", std::isnan(x_CT[i]) ? " (data.missing: zero or hold takes missing ones)" : ""));
      if (data_.missing() == "zero") {
        x_CT[i] = 0;
      } else if (i % points_in_ > 0) {
        x_CT[i] = x_CT[i - 1];
      } else {   // nothing before it: the first value there is
        const float *begin = x_CT + i, *end = begin + points_in_;
        const float* first = std::find_if(begin, end, [](float v) { return std::isfinite(v); });
        x_CT[i] = first == end ? 0 : *first;
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadPooled(uint64_t sample, std::vector<float>* pooled_CT) const {
    const int64_t channels = source_->channels();
    std::vector<float> raw(channels * points_in_);
    RETURN_IF_ERROR(ReadRaw(sample, raw.data()));
    if (pool_ == 1) {
      *pooled_CT = std::move(raw);
      return absl::OkStatus();
    }
    pooled_CT->resize(channels * points_pooled_);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t t = 0; t < points_pooled_; ++t) {
        const int64_t begin = t * pool_, end = std::min(begin + pool_, points_in_);   // the last group may be short
        double sum = 0;
        for (int64_t i = begin; i < end; ++i) sum += raw[c * points_in_ + i];
        (*pooled_CT)[c * points_pooled_ + t] = static_cast<float>(sum / (end - begin));
      }
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<SignalSource> source_;
  const v1::DataSpec data_;
  const int64_t pool_, points_in_, points_pooled_, points_out_, points_kept_;
  const bool finite_, windowed_;
  const bool on_host_;   // rows are prepared in fp32, but for what is drawn and scaled
  const bool looks_;     // for values that are not finite: what is left out must be known before the step
  RowFormat format_;
  mutable std::atomic<int64_t> bytes_{0}, read_ns_{0}, prepare_ns_{0};
};

absl::Status CheckShape(const SignalSource& source, const v1::DataSpec& data, const std::string& path, const Geometry& geometry) {
  const auto problem = [&](const std::string& text) {
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(path), ": ", text));
  };
  const int64_t in_chans = geometry.spec.in_chans(), points = Product(source.axes()), wanted = Product(geometry.input_size);
  const std::string input = absl::StrCat("model.input_size [", absl::StrJoin(geometry.input_size, ", "), "]");
  if (source.channels() != in_chans)
    return problem(absl::StrCat("samples have ", source.channels(), " channels, model.in_chans is ", in_chans));
  if (source.axes().size() > 1) {
    if (data.mean_pool() > 1) return problem(absl::StrCat("data.mean_pool ", data.mean_pool(), " is for time series; samples have ", source.axes().size(), " axes"));
    if (source.axes() != geometry.input_size)
      return problem(absl::StrCat("samples are ", absl::StrJoin(source.axes(), " x "), ", ", input, " is not"));
    return absl::OkStatus();
  }
  if (geometry.dims > 1 && !data.raw_reshape())
    return problem(absl::StrCat("samples are time series of ", points, " points, ", input, " has ", geometry.dims, " axes: set data.raw_reshape: true to lay each channel out row by row"));
  const int64_t pool = std::max(1, data.mean_pool()), pooled = (points + pool - 1) / pool;
  const std::string have = absl::StrCat("samples have ", points, " points", pool > 1 ? absl::StrCat(", ", pooled, " after data.mean_pool ", pool) : "");
  const bool crops = data.crop() == "start" || data.crop() == "center" || data.crop() == "random";
  if (pooled > wanted && !crops) return problem(absl::StrCat(have, "; ", input, " takes ", wanted, ": set data.crop, data.mean_pool, or a larger input_size"));
  if (pooled < wanted && data.pad() != "edge" && data.pad() != "zero")
    return problem(absl::StrCat(have, "; ", input, " needs ", wanted, ": set data.pad to edge or zero, or a smaller input_size"));
  return absl::OkStatus();
}

}  // namespace

absl::Status SignalSource::ReadRow(uint64_t sample, int64_t first, int64_t count, void* row) const {
  const int64_t points = Product(axes());
  auto* const out = static_cast<float*>(row);
  if (count == points) return Read(sample, out);
  const std::unique_ptr<float[]> whole(new float[channels() * points]);
  RETURN_IF_ERROR(Read(sample, whole.get()));
  for (int64_t c = 0; c < channels(); ++c) std::copy_n(whole.get() + c * points + first, count, out + c * count);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Dataset>> MakeSignalDataset(std::unique_ptr<SignalSource> source, const v1::DataSpec& data,
                                                           const std::string& path, const Geometry& geometry,
                                                           ChannelStatistics* statistics) {
  RETURN_IF_ERROR(CheckShape(*source, data, path, geometry));
  const size_t channels = source->channels();
  auto dataset = std::make_unique<SignalDataset>(std::move(source), data, geometry);
  if (data.normalize() == "channel") {
    if (statistics->mean.empty()) {
      ASSIGN_OR_RETURN(*statistics, dataset->ComputeStatistics());
    } else if (statistics->mean.size() != channels || statistics->std.size() != channels) {
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(path), ": the training set's statistics are of ", statistics->mean.size(), " channels, these samples have ", channels));
    }
    dataset->Use(*statistics);
  }
  return dataset;
}

}  // namespace hierad
