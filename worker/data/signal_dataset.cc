#include "worker/data/signal_dataset.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/status.h"

namespace hierad {
namespace {

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

class SignalDataset : public Dataset {
 public:
  SignalDataset(std::unique_ptr<SignalSource> source, const v1::DataSpec& data, int64_t points_out)
      : source_(std::move(source)), data_(data), pool_(std::max(1, data.mean_pool())), points_in_(Product(source_->axes())),
        points_pooled_((points_in_ + pool_ - 1) / pool_), points_out_(points_out) {}

  int64_t count() const override { return source_->count(); }
  int64_t num_classes() const override { return source_->num_classes(); }
  std::string class_name(int64_t label) const override { return source_->class_name(label); }
  int64_t label(uint64_t sample) const override { return source_->label(sample); }
  std::string SampleName(uint64_t sample) const override { return source_->SampleName(sample); }
  std::string Describe() const override {
    return absl::StrCat(source_->Describe(), ": ", count(), " samples, ", source_->channels(), " channels of ",
                        absl::StrJoin(source_->axes(), "x"), " points", pool_ > 1 ? absl::StrCat(", mean of every ", pool_) : "",
                        ", normalize ", data_.normalize().empty() ? "none" : data_.normalize(),
                        points_out_ > points_pooled_ ? absl::StrCat(", padded (", data_.pad(), ") from ", points_pooled_, " to ", points_out_) : "",
                        num_classes() ? absl::StrCat(", ", num_classes(), " classes") : "");
  }

  absl::Status Read(const Visit& visit, float* x_CS) const override {
    std::vector<float> pooled_CT;
    RETURN_IF_ERROR(ReadPooled(visit.sample, &pooled_CT));
    for (int64_t c = 0; c < source_->channels(); ++c) {
      float* channel = pooled_CT.data() + c * points_pooled_;
      float* out = x_CS + c * points_out_;
      Moments moments{0, 1};
      if (data_.normalize() == "window") moments = MomentsOf(channel, points_pooled_);
      if (data_.normalize() == "channel") moments = {statistics_.mean[c], statistics_.std[c]};
      for (int64_t t = 0; t < points_pooled_; ++t) out[t] = static_cast<float>((channel[t] - moments.mean) / moments.std);
      std::fill(out + points_pooled_, out + points_out_, data_.pad() == "edge" ? out[points_pooled_ - 1] : 0.0f);
    }
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
  absl::Status ReadPooled(uint64_t sample, std::vector<float>* pooled_CT) const {
    const int64_t channels = source_->channels();
    std::vector<float> raw(channels * points_in_);
    RETURN_IF_ERROR(source_->Read(sample, raw.data()));
    for (size_t i = 0; i < raw.size(); ++i)
      if (!std::isfinite(raw[i]))
        return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(source_->SampleName(sample), ": value ", raw[i], " at channel ", i / points_in_, ", point ", i % points_in_, "; only finite fp32 values are read"));
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
  const int64_t pool_, points_in_, points_pooled_, points_out_;
  ChannelStatistics statistics_;
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
  const int64_t pool = std::max(1, data.mean_pool()), pooled = (points + pool - 1) / pool;
  const std::string have = absl::StrCat("samples have ", points, " points", pool > 1 ? absl::StrCat(", ", pooled, " after data.mean_pool ", pool) : "");
  if (pooled > wanted) return problem(absl::StrCat(have, "; ", input, " takes ", wanted, ": set data.mean_pool, a larger input_size, or cut the samples"));
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
