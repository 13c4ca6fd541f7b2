#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/data/edf_channels.h"
#include "worker/data/edf_file.h"
#include "worker/data/recording_files.h"
#include "worker/data_tool/channel_statistics.h"
#include "worker/data_tool/data_tool.h"

namespace hierad {
namespace {

constexpr double kWindowS = 4;
constexpr size_t kFilesListed = 50, kPairedChannels = 64;
constexpr double kLoudUv = 2e4, kQuietUv = 0.01;   // scalp EEG has a standard deviation of 5 to 200 uV
constexpr double kBridged = 0.9999, kLineNoise = 10;

struct Channel {
  ChannelSummary values;
  std::string unit;
  std::set<double> rates;
  int64_t files = 0;
  double line[2] = {0, 0}, around[2] = {0, 0};   // power at 50 and 60 Hz, and beside them
};

double PowerAt(const std::vector<float>& x, double hz, double rate) {
  double re = 0, im = 0, mean = 0;
  for (const float v : x) mean += v / double(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double window = 0.5 - 0.5 * std::cos(2 * std::numbers::pi * double(i) / double(x.size()));
    re += window * (x[i] - mean) * std::cos(2 * std::numbers::pi * hz * double(i) / rate);
    im += window * (x[i] - mean) * std::sin(2 * std::numbers::pi * hz * double(i) / rate);
  }
  return re * re + im * im;
}

class Inspector {
 public:
  explicit Inspector(const InspectOptions& options) : options_(options) {}

  absl::StatusOr<Report> Run() {
    ASSIGN_OR_RETURN(const RecordingFiles files, FindRecordings(options_.path, 0, false, Subset::kAll));
    windows_a_file_ = std::max<int64_t>(1, options_.samples / std::max<int64_t>(1, static_cast<int64_t>(files.paths.size())));
    std::vector<std::string> paths = files.paths;
    for (const auto& [recording, beside] : files.annotations)
      for (const std::string& path : beside) paths.push_back(path), joined_.insert(Printable(path));
    paths.insert(paths.end(), files.lone_annotations.begin(), files.lone_annotations.end());
    std::map<std::string, std::string> hashes;
    for (const std::string& path : paths) {
      const auto file = EdfFile::Open(path, false);
      if (!file.ok()) {
        findings_.push_back(std::string(file.status().message()));
        continue;
      }
      RETURN_IF_ERROR(Take(*file));
      ASSIGN_OR_RETURN(const std::string hash, Sha256OfFile(path));
      const auto [at, is_new] = hashes.emplace(hash, file->name());
      if (!is_new) findings_.push_back(absl::StrCat(file->name(), " is a copy of ", at->second));
    }
    Report report;
    report["source"] = "edf";
    report["recordings"] = files.paths.size();
    report["readable"] = readable_;
    report["hours"] = seconds_ / 3600;
    report["listed"] = listed_;
    if (!segments_.empty()) report["segments_of_interrupted_recordings"] = segments_;
    for (const auto& [text, count] : annotations_) {
      report["annotations"].push_back({{"text", PrintableSentence(text, 60)}, {"count", count}});
      if (report["annotations"].size() == kFilesListed) break;
    }
    WriteChannels(&report);
    Compare();
    report["findings"] = findings_;
    report["job_yaml"] = Block();
    return report;
  }

 private:
  absl::Status Take(const EdfFile& file) {
    const EdfHeader& header = file.header();
    ++readable_;
    for (const std::string& warning : header.warnings) findings_.push_back(absl::StrCat(file.name(), ": ", warning));
    const double duration = double(header.records) * header.duration_s();
    seconds_ += duration;
    std::set<std::string> labels, rates;
    for (const EdfSignal& signal : header.signals) {
      if (signal.annotations) continue;
      labels.insert(signal.label);
      rates.insert(absl::StrCat(header.rate(signal)));
    }
    if (listed_.size() < kFilesListed)
      listed_.push_back({{"file", file.name()}, {"kind", header.kind}, {"start", PrintableSentence(header.start, 20)}, {"seconds", duration}, {"signals", labels.size()},
                         {"rates_hz", absl::StrJoin(rates, " ")}, {"annotations", file.annotations().size()}, {"segments", file.segments().size()}});
    if (file.segments().size() > 1)
      for (const EdfFile::Segment& segment : file.segments())
        if (segments_.size() < kFilesListed) segments_.push_back({{"file", file.name()}, {"from_s", segment.onset_s}, {"seconds", double(segment.records) * header.duration_s()}});
    for (const EdfAnnotation& annotation : file.annotations()) ++annotations_[annotation.text];
    if (!header.has_samples()) {
      if (!joined_.contains(file.name())) findings_.push_back(absl::StrCat(file.name(), " holds annotations only, and no recording beside it begins at the same time: nothing comes from it"));
      return absl::OkStatus();
    }
    montages_[labels].push_back(file.name());
    for (size_t s = 0; s < header.signals.size(); ++s) {
      const EdfSignal& signal = header.signals[s];
      if (signal.annotations) continue;
      Channel& channel = channels_[signal.label];
      ++channel.files;
      channel.unit = signal.unit;
      channel.rates.insert(header.rate(signal));
      if (!signal.scale_problem.empty()) findings_.push_back(absl::StrCat(file.name(), ": channel ", Printable(signal.label, 40), " has no physical scale: ", signal.scale_problem));
    }
    return ReadWindows(file);
  }

  absl::Status ReadWindows(const EdfFile& file) {
    const EdfHeader& header = file.header();
    for (int64_t w = 0; w < windows_a_file_; ++w) {
      const EdfFile::Segment& segment = file.segments()[w * file.segments().size() / windows_a_file_];
      std::vector<std::vector<float>> x(header.signals.size());
      std::vector<EdfFile::Piece> pieces;
      for (size_t s = 0; s < header.signals.size(); ++s) {
        const EdfSignal& signal = header.signals[s];
        if (signal.annotations || !signal.scale_problem.empty()) continue;
        const int64_t all = segment.records * signal.samples, points = std::min<int64_t>(all, std::max<int64_t>(1, std::llround(kWindowS * header.rate(signal))));
        x[s].resize(points);
        pieces.push_back({static_cast<int>(s), (all - points) * w / std::max<int64_t>(1, windows_a_file_ - 1), points, x[s].data()});
      }
      RETURN_IF_ERROR(file.Read(segment, pieces));
      for (size_t s = 0; s < x.size(); ++s)
        if (!x[s].empty()) Add(x[s], header.rate(header.signals[s]), &channels_[header.signals[s].label]);
      if (w < 8) Pair(header, x);
    }
    return absl::OkStatus();
  }

  static void Add(const std::vector<float>& x, double rate, Channel* channel) {
    channel->values.Add(x.data(), x.size());
    for (int k = 0; k < 2; ++k) {
      const double hz = k == 0 ? 50 : 60;
      if (rate <= 2 * (hz + 5)) continue;
      channel->line[k] += PowerAt(x, hz, rate);
      for (const double beside : {-4.0, -3.0, 3.0, 4.0}) channel->around[k] += PowerAt(x, hz + beside, rate) / 4;
    }
  }

  // Least correlation of two channels over the windows: bridged electrodes show one signal.
  void Pair(const EdfHeader& header, const std::vector<std::vector<float>>& x) {
    for (size_t a = 0; a < std::min(x.size(), kPairedChannels); ++a)
      for (size_t b = a + 1; b < std::min(x.size(), kPairedChannels); ++b) {
        if (x[a].empty() || x[a].size() != x[b].size()) continue;
        double ma = 0, mb = 0, aa = 0, bb = 0, ab = 0;
        for (size_t i = 0; i < x[a].size(); ++i) ma += x[a][i], mb += x[b][i];
        ma /= double(x[a].size()), mb /= double(x[a].size());
        for (size_t i = 0; i < x[a].size(); ++i) aa += (x[a][i] - ma) * (x[a][i] - ma), bb += (x[b][i] - mb) * (x[b][i] - mb), ab += (x[a][i] - ma) * (x[b][i] - mb);
        if (aa == 0 || bb == 0) continue;
        auto& least = correlations_.emplace(std::pair{header.signals[a].label, header.signals[b].label}, 1.0).first->second;
        least = std::min(least, ab / std::sqrt(aa * bb));
      }
  }

  void WriteChannels(Report* report) {
    for (const auto& [label, channel] : channels_) {
      Report row = {{"channel", PrintableSentence(label, 40)}, {"files", channel.files}, {"unit", PrintableSentence(channel.unit, 12)}, {"rates_hz", absl::StrJoin(channel.rates, " ")}};
      channel.values.Write(&row);
      (*report)["channels"].push_back(row);
    }
  }

  void Compare() {
    for (const auto& [label, channel] : channels_) {
      const std::string name = absl::StrCat("channel ", Printable(label, 40));
      const auto volts = VoltsOf(channel.unit);
      const double uv = channel.values.std() * volts.value_or(0) * 1e6;
      if (channel.values.flat()) findings_.push_back(absl::StrCat(name, " is flat: always ", channel.values.mean()));
      else if (volts && uv > kLoudUv) findings_.push_back(absl::StrCat(name, " has a standard deviation of ", uv, " uV by its unit (", channel.unit, "): the unit may be off by 1e6"));
      else if (volts && uv < kQuietUv) findings_.push_back(absl::StrCat(name, " has a standard deviation of ", uv, " uV by its unit (", channel.unit, "): volts written as uV, off by 1e6?"));
      if (channel.values.clipped() > kClippedFraction) findings_.push_back(absl::StrCat(name, " stands at its least or greatest value in ", 100 * channel.values.clipped(), "% of its points: clipped?"));
      for (int k = 0; k < 2; ++k)
        if (channel.line[k] > kLineNoise * channel.around[k] && channel.around[k] > 0) {
          findings_.push_back(absl::StrCat(name, ": line noise at ", k == 0 ? 50 : 60, " Hz, ", channel.line[k] / channel.around[k], " times the power beside it"));
          notch_ = k == 0 ? 50 : 60;
        }
      if (channel.rates.size() > 1) findings_.push_back(absl::StrCat(name, " has different rates: ", absl::StrJoin(channel.rates, ", "), " Hz; set data.sample_rate"));
    }
    for (const auto& [pair, least] : correlations_)
      if (least > kBridged) findings_.push_back(absl::StrCat("channels ", Printable(pair.first, 40), " and ", Printable(pair.second, 40), " show one signal (correlation ", least, "): bridged?"));
    if (montages_.size() < 2) return;
    const auto usual = std::max_element(montages_.begin(), montages_.end(), [](auto& a, auto& b) { return a.second.size() < b.second.size(); });
    for (const auto& [labels, files] : montages_) {
      if (labels == usual->first) continue;
      std::vector<std::string> lacks, has;
      std::set_difference(usual->first.begin(), usual->first.end(), labels.begin(), labels.end(), std::back_inserter(lacks));
      std::set_difference(labels.begin(), labels.end(), usual->first.begin(), usual->first.end(), std::back_inserter(has));
      findings_.push_back(absl::StrCat("montage: ", files.size(), " recordings (", files[0], ", ...) lack [", Printable(absl::StrJoin(lacks, ", "), 200), "] and have [", Printable(absl::StrJoin(has, ", "), 200), "] beside the other ", usual->second.size()));
    }
  }

  std::string Block() const {
    std::vector<std::string> common;
    std::set<double> rates;
    for (const auto& [label, channel] : channels_) {
      if (channel.files != readable_ || !VoltsOf(channel.unit)) continue;
      common.push_back(absl::StrCat("\"", Printable(label, 40), "\""));
      rates.insert(channel.rates.begin(), channel.rates.end());
    }
    const double rate = rates.empty() ? 0 : *rates.begin();
    return absl::StrCat("  model:\n    in_chans: ", common.size(), "\n    input_size: [", std::llround(2 * rate), "]   # 2 s\n  data:\n    source: edf\n    path: ", Printable(options_.path, 4096), "\n    channels: [", absl::StrJoin(common, ", "), "]\n",
                        rates.size() > 1 ? absl::StrCat("    sample_rate: ", rate, "\n") : "", notch_ ? absl::StrCat("    notch: [", notch_, "]\n") : "", "    normalize: channel\n");
  }

  const InspectOptions options_;
  int64_t windows_a_file_ = 1, readable_ = 0;
  double seconds_ = 0;
  int notch_ = 0;
  Report listed_ = Report::array(), segments_ = Report::array(), findings_ = Report::array();
  std::set<std::string> joined_;   // annotation files of a recording
  std::map<std::string, int64_t> annotations_;
  std::map<std::string, Channel> channels_;
  std::map<std::set<std::string>, std::vector<std::string>> montages_;
  std::map<std::pair<std::string, std::string>, double> correlations_;
};

}  // namespace

absl::StatusOr<Report> InspectRecordings(const InspectOptions& options) { return Inspector(options).Run(); }

}  // namespace hierad
