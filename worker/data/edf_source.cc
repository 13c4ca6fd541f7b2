// Windows of EDF, EDF+ and BDF recordings: channels by name in one unit, filtered, resampled, cut without crossing a gap.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/limits.h"
#include "base/status.h"
#include "spdlog/spdlog.h"
#include "worker/data/edf_channels.h"
#include "worker/data/edf_file.h"
#include "worker/data/recording_files.h"
#include "worker/data/signal_filter.h"
#include "worker/data/signal_source.h"

namespace hierad {
namespace {

constexpr double kTicksPerHz = 1e6;   // data.sample_rate as an exact fraction

// How the samples of one native rate become those of the windows.
struct Chain {
  std::vector<float> taps;               // {1}: none
  std::optional<Resampler> resampler;    // none: the rates are one
};

struct Channel {
  int signal = 0;
  float factor = 1;                      // from the file's unit to data.unit
  const Chain* chain = nullptr;
};

struct Recording {
  EdfFile file;
  std::vector<Channel> channels;
};

// The windows of one segment.
struct Stretch {
  int64_t recording = 0, segment = 0, begin = 0;   // begin: first window's number
};

class EdfSource : public SignalSource {
 public:
  explicit EdfSource(const v1::DataSpec& data) : data_(data) {}

  absl::Status Open(const std::string& path, const Geometry& geometry, Subset subset) {
    ASSIGN_OR_RETURN(files_, FindRecordings(path, data_.held_out(), data_.subject() == "folder", subset));
    const bool keep_open = static_cast<int64_t>(files_.paths.size()) <= limits::kOpenShards;
    for (const std::string& file : files_.paths) RETURN_IF_ERROR(Add(file, keep_open, geometry));
    if (recordings_.empty())
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path ", Printable(path), ": ", files_.lone_annotations.size(), " recordings hold annotations only; they give labels to nothing, at least 1 with signals is needed"));
    RETURN_IF_ERROR(SetWindows(geometry));
    if (count_ == 0)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path ", Printable(path), ": 0 windows of ", axes_[0], " samples (", double(axes_[0]) / rate_, " s at ", rate_, " Hz) in ", recordings_.size(), " recordings, the longest stretch without a gap lasts ", longest_s_, " s; set a smaller data.window_s or model.input_size"));
    return absl::OkStatus();
  }

  int64_t count() const override { return count_; }
  int64_t channels() const override { return recordings_[0].channels.size(); }
  const std::vector<int64_t>& axes() const override { return axes_; }
  int64_t num_classes() const override { return data_.labels_size(); }
  std::string class_name(int64_t label) const override { return data_.labels(static_cast<int>(label)); }
  int64_t label(uint64_t sample) const override { return labels_.empty() ? -1 : labels_[sample]; }
  int64_t sample_bytes() const override {
    const EdfHeader& header = recordings_[0].file.header();
    return static_cast<int64_t>(double(axes_[0]) / rate_ / header.duration_s() * double(header.record_bytes));
  }
  std::string SampleName(uint64_t sample) const override {
    const Stretch& stretch = StretchOf(sample);
    const EdfFile& file = recordings_[stretch.recording].file;
    const double from = file.segments()[stretch.segment].onset_s + double((sample - stretch.begin) * stride_) / rate_;
    return absl::StrFormat("%s, %.4f to %.4f s (sample %d)", file.name(), from, from + double(axes_[0]) / rate_, sample);
  }
  std::string Describe() const override {
    return absl::StrCat(recordings_[0].file.header().kind, ": ", recordings_.size(), " recordings", joined_ ? absl::StrCat(", ", joined_, " annotation files joined to them") : "",
                        files_.lone_annotations.empty() ? "" : absl::StrCat(" (and ", files_.lone_annotations.size(), " with annotations only, which belong to none, left alone)"),
                        ", ", rate_, " Hz, in ", data_.unit().empty() ? "uV" : data_.unit(), files_.held_out ? absl::StrCat(", ", files_.held_out, " of ", files_.subjects, " subjects held out") : "",
                        ", a window every ", double(stride_) / rate_, " s");
  }

  absl::Status Read(uint64_t sample, float* x_CT) const override {
    const Stretch& stretch = StretchOf(sample);
    const Recording& recording = recordings_[stretch.recording];
    const EdfFile::Segment& segment = recording.file.segments()[stretch.segment];
    const int64_t begin = static_cast<int64_t>(sample - stretch.begin) * stride_, points = axes_[0];
    std::vector<EdfFile::Piece> pieces(recording.channels.size());
    std::vector<Resampler::Range> needed(recording.channels.size());   // filtered input
    std::vector<std::vector<float>> raw(recording.channels.size());
    for (size_t c = 0; c < pieces.size(); ++c) {
      const Channel& channel = recording.channels[c];
      const int64_t n = segment.records * recording.file.header().signals[channel.signal].samples, reach = channel.chain->taps.size() / 2;
      needed[c] = channel.chain->resampler ? channel.chain->resampler->InputsFor(begin, points) : Resampler::Range{begin, points};
      const SampleRange range = ReflectedRange(n, needed[c].first - reach, needed[c].first + needed[c].count + reach);
      pieces[c] = {channel.signal, range.begin, range.end - range.begin, x_CT + c * points};
      if (reach == 0 && !channel.chain->resampler) continue;   // straight to its place
      raw[c].resize(pieces[c].count);
      pieces[c].out = raw[c].data();
    }
    RETURN_IF_ERROR(recording.file.Read(segment, pieces));
    for (size_t c = 0; c < pieces.size(); ++c) {
      const Channel& channel = recording.channels[c];
      float* out = x_CT + c * points;
      if (!raw[c].empty()) {
        const int64_t n = segment.records * recording.file.header().signals[channel.signal].samples;
        Filter(*channel.chain, raw[c].data(), pieces[c].begin, n, needed[c], begin, out);
      }
      if (channel.factor != 1)
        for (int64_t t = 0; t < points; ++t) out[t] *= channel.factor;
    }
    return absl::OkStatus();
  }

 private:
  // x: samples from `first` on, of a segment of n.
  void Filter(const Chain& chain, const float* x, int64_t first, int64_t n, const Resampler::Range& needed, int64_t begin, float* out) const {
    const int64_t taps = chain.taps.size(), reach = taps / 2, points = axes_[0];
    std::vector<float> wide(needed.count + 2 * reach);
    for (int64_t i = 0; i < static_cast<int64_t>(wide.size()); ++i) wide[i] = Reflected(x, first, n, needed.first - reach + i);
    if (!chain.resampler) return ApplyFilter(chain.taps, wide.data(), points, out);
    if (taps == 1) return chain.resampler->Apply(wide.data(), begin, points, out);
    std::vector<float> filtered(needed.count);
    ApplyFilter(chain.taps, wide.data(), needed.count, filtered.data());
    chain.resampler->Apply(filtered.data(), begin, points, out);
  }

  absl::Status Add(const std::string& path, bool keep_open, const Geometry& geometry) {
    ASSIGN_OR_RETURN(EdfFile file, EdfFile::Open(path, keep_open));
    for (const std::string& warning : file.header().warnings) spdlog::warn("{}: {}", file.name(), warning);
    if (!file.header().has_samples()) {   // the one file that data.path names
      files_.lone_annotations.push_back(path);
      return absl::OkStatus();
    }
    if (const auto beside = files_.annotations.find(path); beside != files_.annotations.end()) {
      for (const std::string& other : beside->second) {
        ASSIGN_OR_RETURN(const EdfFile annotations, EdfFile::Open(other, /*keep_open=*/false));
        file.AddAnnotations(annotations.annotations());
        ++joined_;
      }
    }
    Recording recording{std::move(file), {}};
    RETURN_IF_ERROR(ChooseChannels(geometry, &recording));
    for (Channel& channel : recording.channels) RETURN_IF_ERROR(SetChain(recording.file, &channel));
    recordings_.push_back(std::move(recording));
    return absl::OkStatus();
  }

  absl::Status ChooseChannels(const Geometry& geometry, Recording* recording) const {
    const EdfHeader& header = recording->file.header();
    std::vector<int> signals;
    for (const std::string& wanted : data_.channels()) {
      ASSIGN_OR_RETURN(const int signal, FindChannel(header, wanted, recording->file.name()));
      signals.push_back(signal);
    }
    if (data_.channels_size() == 0) {
      std::vector<std::string> labels;
      for (size_t i = 0; i < header.signals.size(); ++i) {
        if (header.signals[i].annotations) continue;
        signals.push_back(static_cast<int>(i));
        labels.push_back(Printable(header.signals[i].label, 40));
      }
      const int64_t in_chans = geometry.spec.in_chans();
      if (static_cast<int64_t>(signals.size()) != in_chans)
        return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(recording->file.name(), " has ", signals.size(), " signals, model.in_chans is ", in_chans, ": name those to use in data.channels; there are ", Printable(absl::StrJoin(labels, ", "), 600)));
    }
    for (const int signal : signals) {
      ASSIGN_OR_RETURN(const float factor, Factor(header.signals[signal], recording->file.name()));
      recording->channels.push_back({signal, factor, nullptr});
    }
    return absl::OkStatus();
  }

  absl::StatusOr<float> Factor(const EdfSignal& signal, const std::string& file) const {
    const std::string name = absl::StrCat(file, ": channel '", Printable(signal.label, 40), "'");
    if (!signal.scale_problem.empty()) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, " has no physical scale: ", signal.scale_problem));
    if (data_.unit() == "file") return 1.0f;
    const auto volts = VoltsOf(signal.unit), wanted = VoltsOf(data_.unit().empty() ? "uV" : data_.unit());
    if (!volts) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, " is in '", Printable(signal.unit, 20), "', which is no voltage; set data.unit: file to read it as it is, or leave it out of data.channels"));
    return static_cast<float>(*volts / *wanted);
  }

  // The first channel sets the rate of all where data.sample_rate does not.
  absl::Status SetChain(const EdfFile& file, Channel* channel) {
    const EdfHeader& header = file.header();
    const EdfSignal& signal = header.signals[channel->signal];
    const double rate = header.rate(signal);
    if (rate_ == 0) rate_ = data_.has_sample_rate() ? data_.sample_rate() : rate;
    if (!data_.has_sample_rate() && std::abs(rate - rate_) > 1e-9 * rate_)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name(), ": channel '", Printable(signal.label, 40), "' has ", rate, " Hz, others ", rate_, "; set data.sample_rate to resample all to one rate"));
    const auto key = std::pair{signal.samples * header.ticks_per_s, header.duration_ticks};
    auto at = chains_.find(key);
    if (at == chains_.end()) {
      FilterSpec filter;
      if (data_.band_pass_size() == 2) filter.low_hz = data_.band_pass(0), filter.high_hz = data_.band_pass(1);
      filter.notches_hz.assign(data_.notch().begin(), data_.notch().end());
      Chain chain;
      const auto taps = DesignFilter(filter, rate);
      if (!taps.ok()) return Annotate(taps.status(), file.name());
      chain.taps = *taps;
      if (std::abs(rate - rate_) > 1e-9 * rate_) {
        ASSIGN_OR_RETURN(chain.resampler, MakeResampler(signal, header, file.name()));
      }
      at = chains_.emplace(key, std::move(chain)).first;
    }
    channel->chain = &at->second;
    return absl::OkStatus();
  }

  absl::StatusOr<Resampler> MakeResampler(const EdfSignal& signal, const EdfHeader& header, const std::string& file) const {
    // Inputs per output: samples * ticks_per_s / duration_ticks, over rate_.
    __int128 num = static_cast<__int128>(signal.samples) * header.ticks_per_s * static_cast<int64_t>(kTicksPerHz);
    __int128 den = static_cast<__int128>(header.duration_ticks) * std::llround(rate_ * kTicksPerHz);
    for (__int128 a = num, b = den;;) {
      if (b == 0) {
        num /= a, den /= a;
        break;
      }
      a = std::exchange(b, a % b);
    }
    if (num > (int64_t{1} << 62) || den > (int64_t{1} << 62) || num > den * 4096 || den > num * 4096)
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(file, ": ", header.rate(signal), " Hz cannot be resampled to data.sample_rate ", rate_));
    return Resampler(static_cast<int64_t>(num), static_cast<int64_t>(den));
  }

  absl::Status SetWindows(const Geometry& geometry) {
    const int64_t model = std::accumulate(geometry.input_size.begin(), geometry.input_size.end(), int64_t{1}, std::multiplies<>()) * std::max(1, data_.mean_pool());
    const int64_t points = data_.has_window_s() ? std::llround(data_.window_s() * rate_) : model;
    stride_ = data_.has_stride_s() ? std::llround(data_.stride_s() * rate_) : points;
    if (points < 1 || stride_ < 1)
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("at ", rate_, " Hz a window of data.window_s has ", points, " samples and a stride of data.stride_s ", stride_, "; at least 1 is needed of each"));
    if (points > limits::kSampleElements / std::max<int64_t>(1, channels()))
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("a window of ", points, " samples of ", channels(), " channels is more than ", limits::kSampleElements, " numbers; set a smaller data.window_s"));
    axes_ = {points};
    for (size_t r = 0; r < recordings_.size(); ++r) {
      const Recording& recording = recordings_[r];
      for (size_t s = 0; s < recording.file.segments().size(); ++s) {
        const int64_t outputs = OutputsOf(recording, recording.file.segments()[s]);
        longest_s_ = std::max(longest_s_, double(outputs) / rate_);
        if (outputs < points) continue;
        stretches_.push_back({static_cast<int64_t>(r), static_cast<int64_t>(s), count_});
        const int64_t windows = (outputs - points) / stride_ + 1;
        if (windows > limits::kVisitsPerEpoch - count_) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("more than ", limits::kVisitsPerEpoch, " windows; set a larger data.stride_s"));
        count_ += windows;
        if (data_.labels_size() > 0) LabelWindows(recording.file, recording.file.segments()[s], windows);
      }
    }
    return absl::OkStatus();
  }

  // Of the channel that ends first.
  static int64_t OutputsOf(const Recording& recording, const EdfFile::Segment& segment) {
    int64_t least = INT64_MAX;
    for (const Channel& channel : recording.channels) {
      const int64_t inputs = segment.records * recording.file.header().signals[channel.signal].samples;
      least = std::min(least, channel.chain->resampler ? channel.chain->resampler->OutputsOf(inputs) : inputs);
    }
    return least;
  }

  // The class whose annotations cover most of a window; one without a length covers a sample.
  void LabelWindows(const EdfFile& file, const EdfFile::Segment& segment, int64_t windows) {
    const double length = double(axes_[0]) / rate_, step = double(stride_) / rate_;
    std::vector<std::map<int, double>> covered(windows);
    for (const EdfAnnotation& annotation : file.annotations()) {
      const auto at = std::find(data_.labels().begin(), data_.labels().end(), annotation.text);
      if (at == data_.labels().end()) continue;
      const double from = annotation.onset_s - segment.onset_s, to = from + std::max(annotation.duration_s, 1 / rate_);
      // Clamped before the cast: times of a file may be beyond 64 bits.
      const auto window = [&](double time) { return static_cast<int64_t>(std::clamp(std::floor(time / step), -1.0, double(windows))); };
      const int64_t first = std::max<int64_t>(0, window(from - length)), last = std::min(windows - 1, window(to));
      for (int64_t w = first; w <= last; ++w) {
        const double overlap = std::min(to, double(w) * step + length) - std::max(from, double(w) * step);
        if (overlap > 1e-9) covered[w][static_cast<int>(at - data_.labels().begin())] += overlap;
      }
    }
    for (const std::map<int, double>& classes : covered) {
      const auto most = std::max_element(classes.begin(), classes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
      labels_.push_back(most == classes.end() ? -1 : most->first);
    }
  }

  const Stretch& StretchOf(uint64_t sample) const {
    return *(std::upper_bound(stretches_.begin(), stretches_.end(), static_cast<int64_t>(sample), [](int64_t s, const Stretch& stretch) { return s < stretch.begin; }) - 1);
  }

  const v1::DataSpec data_;
  RecordingFiles files_;
  std::vector<Recording> recordings_;
  std::map<std::pair<int64_t, int64_t>, Chain> chains_;   // by native rate; stays where it is
  std::vector<Stretch> stretches_;
  std::vector<int32_t> labels_;                           // of each window; empty: none
  std::vector<int64_t> axes_;
  double rate_ = 0, longest_s_ = 0;
  int64_t stride_ = 0, count_ = 0, joined_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SignalSource>> OpenRecordings(const v1::DataSpec& data, const std::string& path, const Geometry& geometry, Subset subset) {
  auto source = std::make_unique<EdfSource>(data);
  RETURN_IF_ERROR(source->Open(path, geometry, subset));
  return source;
}

}  // namespace hierad
