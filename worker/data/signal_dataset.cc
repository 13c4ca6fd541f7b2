#include "worker/data/signal_dataset.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
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

// Later by `shift` points (earlier where negative); zeros move in.
void Shift(float* x, int64_t points, int64_t shift) {
  if (shift >= points || shift <= -points) {
    std::fill_n(x, points, 0.0f);
  } else if (shift > 0) {
    std::copy_backward(x, x + points - shift, x + points);
    std::fill_n(x, shift, 0.0f);
  } else if (shift < 0) {
    std::copy(x - shift, x + points, x);
    std::fill_n(x + points + shift, -shift, 0.0f);
  }
}

// Linear: drops a channel with the given probability, shifts all by one distance, scales all by one factor.
void Augment(const v1::DataSpec& data, const Visit& visit, int64_t channels, int64_t points, float* x_CT) {
  if (data.shift() > 0) {
    const int64_t most = data.shift();
    const RandomStream draws{visit.seed, Draw::kShift, visit.epoch, visit.id};
    const int64_t shift = std::min(2 * most, static_cast<int64_t>(double{draws.Uniform(0)} * static_cast<double>(2 * most + 1))) - most;
    for (int64_t c = 0; c < channels; ++c) Shift(x_CT + c * points, points, shift);
  }
  if (data.channel_drop() > 0) {
    const RandomStream draws{visit.seed, Draw::kChannelDrop, visit.epoch, visit.id};
    for (int64_t c = 0; c < channels; ++c)
      if (double{draws.Uniform(c)} < data.channel_drop()) std::fill_n(x_CT + c * points, points, 0.0f);
  }
  if (data.amplitude_size() == 2) {
    const RandomStream draws{visit.seed, Draw::kAmplitude, visit.epoch, visit.id};
    const float factor = static_cast<float>(data.amplitude(0) + (data.amplitude(1) - data.amplitude(0)) * double{draws.Uniform(0)});
    for (int64_t i = 0; i < channels * points; ++i) x_CT[i] *= factor;
  }
}

thread_local int64_t read_here_ns = 0;   // of this thread's reads: what a whole read took less this is preparation

class SignalDataset : public Dataset {
 public:
  SignalDataset(std::unique_ptr<SignalSource> source, const v1::DataSpec& data, int64_t points_out)
      : source_(std::move(source)), data_(data), pool_(std::max(1, data.mean_pool())), points_in_(Product(source_->axes())),
        points_pooled_((points_in_ + pool_ - 1) / pool_), points_out_(points_out), points_kept_(std::min(points_pooled_, points_out)),
        finite_(source_->always_finite()), scale_(data.has_scale() ? data.scale() : 1) {}

  int64_t count() const override { return source_->count(); }
  int64_t num_classes() const override { return source_->num_classes(); }
  std::string class_name(int64_t label) const override { return source_->class_name(label); }
  int64_t label(uint64_t sample) const override { return source_->label(sample); }
  std::string SampleName(uint64_t sample) const override { return source_->SampleName(sample); }
  int64_t bytes_read() const override { return bytes_; }
  std::vector<std::pair<std::string, double>> stages() const override { return {{"read", double(read_ns_) / 1e9}, {"prepare", double(prepare_ns_) / 1e9}}; }
  std::string Describe() const override {
    return absl::StrCat(source_->Describe(), ": ", count(), " samples, ", source_->channels(), " channels of ",
                        absl::StrJoin(source_->axes(), "x"), " points", pool_ > 1 ? absl::StrCat(", mean of every ", pool_) : "",
                        points_kept_ < points_pooled_ ? absl::StrCat(", cropped (", data_.crop(), ") from ", points_pooled_, " to ", points_kept_) : "",
                        ", normalize ", data_.normalize().empty() ? "none" : data_.normalize(),
                        points_out_ > points_pooled_ ? absl::StrCat(", padded (", data_.pad(), ") from ", points_pooled_, " to ", points_out_) : "",
                        num_classes() ? absl::StrCat(", ", num_classes(), " classes") : "");
  }

  absl::Status Read(const Visit& visit, float* x_CS) const override {
    const auto begin = Clock::System().Monotonic();
    const int64_t read_before = read_here_ns;
    const absl::Status status = Prepare(visit, x_CS);
    prepare_ns_.fetch_add((Clock::System().Monotonic() - begin).count() - (read_here_ns - read_before), std::memory_order_relaxed);
    return status;
  }

  absl::Status Prepare(const Visit& visit, float* x_CS) const {
    const int64_t channels = source_->channels();
    // Nothing changes its length: it is read into its place.
    const bool in_place = pool_ == 1 && points_in_ == points_out_;
    std::vector<float> pooled_CT;
    if (in_place) {
      RETURN_IF_ERROR(ReadRaw(visit.sample, x_CS));
    } else {
      RETURN_IF_ERROR(ReadPooled(visit.sample, &pooled_CT));
    }
    const int64_t start = CropStart(data_, visit, points_pooled_, points_out_);
    for (int64_t c = 0; c < channels; ++c) {
      float* out = x_CS + c * points_out_;
      if (!in_place) std::copy_n(pooled_CT.data() + c * points_pooled_ + start, points_kept_, out);
      Clip(out, points_kept_);
      Normalise(c, out);
      std::fill(out + points_kept_, out + points_out_, data_.pad() == "edge" ? out[points_kept_ - 1] : 0.0f);
    }
    if (visit.augment) Augment(data_, visit, channels, points_out_, x_CS);
    return absl::OkStatus();
  }

  // Mean and standard deviation of each channel over all samples and points, merged sample by sample (Chan et al.).
  absl::Status ComputeStatistics() {
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
    for (int64_t c = 0; c < channels; ++c) {
      const double std = std::sqrt(squares[c] / n);
      statistics_.mean.push_back(mean[c]);
      statistics_.std.push_back(std > 0 ? std : 1);
    }
    return absl::OkStatus();
  }

  const ChannelStatistics& statistics() const { return statistics_; }
  void set_statistics(const ChannelStatistics& statistics) { statistics_ = statistics; }

 private:
  void Clip(float* x, int64_t size) const {
    if (!data_.has_clip()) return;
    const float most = static_cast<float>(data_.clip());
    for (int64_t i = 0; i < size; ++i) x[i] = std::clamp(x[i], -most, most);
  }

  void Normalise(int64_t channel, float* x) const {
    Moments moments{0, scale_};
    if (data_.normalize() == "window") moments = MomentsOf(x, points_kept_);
    if (data_.normalize() == "channel") moments = {statistics_.mean[channel], statistics_.std[channel]};
    if (moments.mean == 0 && moments.std == 1) return;
    for (int64_t t = 0; t < points_kept_; ++t) x[t] = static_cast<float>((x[t] - moments.mean) / moments.std);
  }

  absl::Status ReadRaw(uint64_t sample, float* x_CT) const {
    const auto begin = Clock::System().Monotonic();
    const absl::Status read = source_->Read(sample, x_CT);
    const int64_t took = (Clock::System().Monotonic() - begin).count();
    read_here_ns += took;
    read_ns_.fetch_add(took, std::memory_order_relaxed);
    RETURN_IF_ERROR(read);
    bytes_.fetch_add(source_->sample_bytes(), std::memory_order_relaxed);
    const int64_t size = source_->channels() * points_in_;
    uint32_t largest = 0;   // magnitudes compare as their bits do
    if (!finite_)
      for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x_CT[i]) & 0x7FFFFFFFu);
    return largest < kInfinityBits ? absl::OkStatus() : Mend(sample, x_CT);
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
  const bool finite_;
  const double scale_;
  ChannelStatistics statistics_;
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

absl::StatusOr<std::unique_ptr<Dataset>> MakeSignalDataset(std::unique_ptr<SignalSource> source, const v1::DataSpec& data,
                                                           const std::string& path, const Geometry& geometry,
                                                           ChannelStatistics* statistics) {
  RETURN_IF_ERROR(CheckShape(*source, data, path, geometry));
  const size_t channels = source->channels();
  auto dataset = std::make_unique<SignalDataset>(std::move(source), data, Product(geometry.input_size));
  if (data.normalize() == "channel") {
    if (statistics->mean.empty()) {
      RETURN_IF_ERROR(dataset->ComputeStatistics());
      *statistics = dataset->statistics();
    } else if (statistics->mean.size() != channels || statistics->std.size() != channels) {
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(path), ": the training set's statistics are of ", statistics->mean.size(), " channels, these samples have ", channels));
    } else {
      dataset->set_statistics(*statistics);
    }
  }
  return dataset;
}

}  // namespace hierad
