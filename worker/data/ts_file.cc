#include "worker/data/ts_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/job_paths.h"
#include "base/limits.h"
#include "base/status.h"
#include "worker/data/signal_source.h"

namespace hierad {
namespace {

std::string_view Trim(std::string_view text) {
  while (!text.empty() && absl::ascii_isspace(text.front())) text.remove_prefix(1);
  while (!text.empty() && absl::ascii_isspace(text.back())) text.remove_suffix(1);
  return text;
}

class TsParser {
 public:
  TsParser(std::string_view text, const std::string& path, const TsOptions& options) : text_(text), path_(Printable(path)), options_(options) {}

  absl::StatusOr<TsFile> Parse() {
    if (text_.substr(0, 3) == "\xEF\xBB\xBF") text_.remove_prefix(3);
    while (!text_.empty()) {
      const size_t end = text_.find('\n');
      ended_ = end != std::string_view::npos;
      std::string_view line = text_.substr(0, end);
      text_.remove_prefix(ended_ ? end + 1 : text_.size());
      ++line_number_;
      if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
      const std::string_view trimmed = Trim(line);
      if (trimmed.empty() || trimmed.front() == '#') continue;
      if (in_data_) {
        RETURN_IF_ERROR(Sample(line));
      } else {
        RETURN_IF_ERROR(Header(trimmed));
      }
    }
    if (!in_data_) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(path_, ": no @data line in ", line_number_, " lines; a .ts file has headers, @data, then one sample a line"));
    if (file_.count == 0) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(path_, ": 0 samples after @data; at least 1 is needed"));
    RETURN_IF_ERROR(Even());
    return std::move(file_);
  }

 private:
  absl::Status Error(const std::string& problem) const {
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(path_, ":", line_number_, ": ", problem,
                                                       ended_ ? "" : "; the file ends inside this line and may be cut short: fetch it again"));
  }

  absl::Status Header(std::string_view line) {
    if (line.front() != '@') return Error(absl::StrCat("'", Printable(line, 40), "' stands before @data; a header begins with '@'"));
    const std::vector<std::string> words =
        absl::StrSplit(absl::string_view(line.data(), line.size()), absl::ByAnyChar(" \t"), absl::SkipEmpty());
    const std::string key = absl::AsciiStrToLower(words[0]);
    const std::string value = words.size() > 1 ? absl::AsciiStrToLower(words[1]) : "";
    if (key == "@data") {
      in_data_ = true;
    } else if (key == "@timestamps" && value == "true") {
      return Error("@timestamps true: time stamps are not read; write the values alone, at an even rate");
    } else if (key == "@targetlabel" && value == "true") {
      return Error("@targetLabel true: regression targets are not read; use @classLabel, or none");
    } else if (key == "@classlabel" && value == "true") {
      if (words.size() < 3) return Error("@classLabel true without class names");
      file_.class_names.assign(words.begin() + 2, words.end());
    } else if (key == "@dimensions" || key == "@dimension") {
      return Number(key, value, &declared_channels_);
    } else if (key == "@serieslength") {
      return Number(key, value, &declared_length_);
    }
    return absl::OkStatus();
  }

  absl::Status Number(const std::string& key, const std::string& value, int64_t* out) {
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *out);
    if (error != std::errc() || end != value.data() + value.size() || *out < 1)
      return Error(absl::StrCat(key, " '", Printable(value, 40), "': a positive number is needed"));
    return absl::OkStatus();
  }

  absl::Status Sample(std::string_view line) {
    fields_.clear();
    for (size_t begin = 0;;) {
      const size_t end = line.find(':', begin);
      fields_.push_back(line.substr(begin, end == std::string_view::npos ? end : end - begin));
      if (end == std::string_view::npos) break;
      begin = end + 1;
    }
    if (!file_.class_names.empty()) RETURN_IF_ERROR(Label());
    else if (fields_.size() > 1 && Trim(fields_.back()).empty()) fields_.pop_back();   // aeon ends a line without a label with ':'
    const int64_t channels = fields_.size();
    if (file_.count == 0) {
      if (declared_channels_ > 0 && channels != declared_channels_)
        return Error(absl::StrCat(channels, " channels, but the header says @dimensions ", declared_channels_));
      file_.channels = channels;
    } else if (channels != file_.channels) {
      return Error(absl::StrCat(channels, " channels, but the sample at line ", file_.lines[0], " has ", file_.channels));
    }
    for (int64_t c = 0; c < channels; ++c) RETURN_IF_ERROR(Channel(c, line.data()));
    file_.lines.push_back(static_cast<int32_t>(line_number_));
    ++file_.count;
    return absl::OkStatus();
  }

  absl::Status Label() {
    const std::string_view label = Trim(fields_.back());
    if (fields_.size() < 2 || label.empty() || label.find(',') != std::string_view::npos)
      return Error("no class label at the end of the line");
    const auto at = std::find(file_.class_names.begin(), file_.class_names.end(), label);
    if (at == file_.class_names.end())
      return Error(absl::StrCat("class label '", Printable(label, 60), "' is none of @classLabel's: ",
                                Printable(absl::StrJoin(file_.class_names, ", "), 200)));
    fields_.pop_back();
    file_.labels.push_back(static_cast<int32_t>(at - file_.class_names.begin()));
    return absl::OkStatus();
  }

  absl::Status Channel(int64_t channel, const char* line_begin) {
    const std::string_view field = fields_[channel];
    int64_t length = 0;
    for (size_t begin = 0; begin <= field.size();) {
      size_t end = field.find(',', begin);
      if (end == std::string_view::npos) end = field.size();
      RETURN_IF_ERROR(Value(field.substr(begin, end - begin), channel, field.data() + begin - line_begin + 1));
      ++length;
      begin = end + 1;
    }
    if (options_.unequal != TsOptions::Unequal::kRefuse) {
      lengths_.push_back(length);
      file_.length = std::max(file_.length, length);
    } else if (file_.length == 0) {
      if (declared_length_ > 0 && length != declared_length_)
        return Error(absl::StrCat("channel ", channel + 1, " has ", length, " values, but the header says @seriesLength ", declared_length_));
      file_.length = length;
    } else if (length != file_.length) {
      return Error(absl::StrCat("channel ", channel + 1, " has ", length, " values, but channel 1 of the first sample (line ",
                                file_.lines.empty() ? line_number_ : file_.lines[0], ") has ", file_.length,
                                "; series of unequal length are refused: set data.unequal to zero or edge, which pad them, or cut them to one length"));
    }
    return absl::OkStatus();
  }

  // Pads every series to the longest one.
  absl::Status Even() {
    if (lengths_.empty()) return absl::OkStatus();
    const int64_t series = lengths_.size();
    if (file_.length > limits::kTsFileBytes / series)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(path_, ": ", series, " series padded to ", file_.length, " values are more than ", limits::kTsFileBytes, " values: cut them to one length"));
    std::vector<float> even(series * file_.length, 0.0f);
    int64_t begin = 0;
    for (int64_t i = 0; i < series; ++i) {
      float* out = even.data() + i * file_.length;
      std::copy_n(file_.values.data() + begin, lengths_[i], out);
      if (options_.unequal == TsOptions::Unequal::kEdge) std::fill(out + lengths_[i], out + file_.length, out[lengths_[i] - 1]);
      begin += lengths_[i];
    }
    file_.values = std::move(even);
    return absl::OkStatus();
  }

  absl::Status Value(std::string_view token, int64_t channel, int64_t column) {
    token = Trim(token);
    std::string_view digits = token;
    if (!digits.empty() && digits.front() == '+') digits.remove_prefix(1);
    double value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error == std::errc::result_out_of_range) value = std::strtod(std::string(digits).c_str(), nullptr);   // 0 or inf
    const bool parsed = !digits.empty() && error != std::errc::invalid_argument && end == digits.data() + digits.size();
    const bool missing = token == "?" || (parsed && std::isnan(value));
    const float narrow = missing ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(value);
    if ((missing && options_.missing) || (parsed && std::isfinite(narrow))) {
      file_.values.push_back(narrow);
      return absl::OkStatus();
    }
    const std::string where = absl::StrCat("column ", column, " (channel ", channel + 1, "): ");
    if (token.empty() || missing)
      return Error(absl::StrCat(where, "missing value '", Printable(token, 40), "'; missing values are refused: set data.missing to zero or hold (they are written as ?), fill them, or leave the sample out"));
    return Error(absl::StrCat(where, "'", Printable(token, 40), parsed ? "' is not a finite fp32 number" : "' is not a number"));
  }

  std::string_view text_;
  const std::string path_;
  const TsOptions options_;
  TsFile file_;
  std::vector<int64_t> lengths_;   // of each series, where they may differ
  std::vector<std::string_view> fields_;
  int64_t line_number_ = 0, declared_channels_ = 0, declared_length_ = 0;
  bool in_data_ = false, ended_ = true;
};

class TsSource : public SignalSource {
 public:
  TsSource(std::string path, TsFile file) : path_(std::move(path)), file_(std::move(file)), axes_{file_.length} {}
  int64_t count() const override { return file_.count; }
  int64_t channels() const override { return file_.channels; }
  const std::vector<int64_t>& axes() const override { return axes_; }
  int64_t num_classes() const override { return file_.class_names.size(); }
  std::string class_name(int64_t label) const override { return file_.class_names[label]; }
  int64_t label(uint64_t sample) const override { return file_.labels.empty() ? -1 : file_.labels[sample]; }
  absl::Status Read(uint64_t sample, float* x_CT) const override {
    const int64_t size = file_.channels * file_.length;
    std::copy_n(file_.values.data() + sample * size, size, x_CT);
    return absl::OkStatus();
  }
  std::string SampleName(uint64_t sample) const override {
    return absl::StrCat(Printable(path_), ":", file_.lines[sample], " (sample ", sample, ")");
  }
  std::string Describe() const override { return "ts"; }

 private:
  const std::string path_;
  const TsFile file_;
  const std::vector<int64_t> axes_;
};

}  // namespace

absl::StatusOr<TsFile> ParseTs(std::string_view text, const std::string& path, const TsOptions& options) { return TsParser(text, path, options).Parse(); }

absl::StatusOr<std::unique_ptr<SignalSource>> OpenTs(const std::string& path, const v1::DataSpec& data) {
  TsOptions options;
  if (data.unequal() == "zero") options.unequal = TsOptions::Unequal::kZero;
  if (data.unequal() == "edge") options.unequal = TsOptions::Unequal::kEdge;
  options.missing = data.missing() == "zero" || data.missing() == "hold";
  ASSIGN_OR_RETURN(const std::string text, ReadJobFile(path, limits::kTsFileBytes));
  ASSIGN_OR_RETURN(TsFile file, ParseTs(text, path, options));
  return std::make_unique<TsSource>(path, std::move(file));
}

}  // namespace hierad
