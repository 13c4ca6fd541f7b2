#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/data/signal_source.h"
#include "worker/data_tool/channel_statistics.h"
#include "worker/data_tool/data_tool.h"

namespace hierad {
namespace {

// Whatever number of axes the arrays have: [N, C, T], [N, C, H, W], [N, C, T, H, W], [N, T].
absl::StatusOr<std::unique_ptr<SignalSource>> OpenAny(const std::string& path, const std::string& source) {
  if (source == "ts") {
    v1::DataSpec data;
    data.set_missing("hold");
    auto strict = OpenTs(path, data);
    if (strict.ok()) return strict;
    data.set_unequal("edge");
    auto padded = OpenTs(path, data);
    return padded.ok() ? std::move(padded) : std::move(strict);
  }
  absl::Status first;
  for (const auto& [dims, chans] : std::vector<std::pair<int, int64_t>>{{1, 0}, {2, 0}, {3, 0}, {1, 1}, {2, 1}}) {
    auto opened = OpenNpy(path, dims, chans);
    if (opened.ok()) return opened;
    if (first.ok()) first = opened.status();
  }
  return first;
}

}  // namespace

absl::StatusOr<Report> InspectArrays(const InspectOptions& options, const std::string& source_name) {
  ASSIGN_OR_RETURN(const std::unique_ptr<SignalSource> source, OpenAny(options.path, source_name));
  const int64_t channels = source->channels();
  int64_t points = 1;
  for (const int64_t axis : source->axes()) points *= axis;
  std::vector<ChannelSummary> summaries(channels);
  std::map<std::string, int64_t> seen;   // hash of a sample -> the first that has it
  Report findings = Report::array();
  int64_t copies = 0, read = 0;
  std::vector<float> x(channels * points);
  const int64_t step = std::max<int64_t>(1, (source->count() + options.samples - 1) / options.samples);
  for (int64_t i = 0; i < source->count(); i += step) {
    RETURN_IF_ERROR(source->Read(i, x.data()));
    ++read;
    for (int64_t c = 0; c < channels; ++c) summaries[c].Add(x.data() + c * points, points);
    const auto [at, is_new] = seen.emplace(Sha256Hex({reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float)}), i);
    if (is_new) continue;
    if (copies++ == 0) findings.push_back(absl::StrCat("duplicate: ", source->SampleName(i), " equals sample ", at->second));
  }
  if (copies > 1) findings.push_back(absl::StrCat(copies, " of the ", read, " samples read equal an earlier one"));
  Report report;
  report["source"] = source_name;
  report["what"] = source->Describe();
  report["rows"] = RowTypeName(source->row_type());   // as the step takes them, where the host need not prepare them
  report["samples"] = source->count();
  report["read"] = read;
  report["channels"] = channels;
  report["shape_of_a_channel"] = absl::StrJoin(source->axes(), " x ");
  if (source->num_classes() > 0) {
    std::vector<int64_t> counts(source->num_classes() + 1, 0);
    for (int64_t i = 0; i < source->count(); ++i) ++counts[source->label(i) + 1];
    report["classes"] = Report::array();
    for (int64_t k = 0; k < source->num_classes(); ++k) report["classes"].push_back({{"class", PrintableSentence(source->class_name(k), 60)}, {"samples", counts[k + 1]}});
    if (counts[0] > 0) findings.push_back(absl::StrCat(counts[0], " samples have no label"));
  }
  report["values"] = Report::array();
  bool holes = false;   // NaN or infinite
  for (int64_t c = 0; c < channels; ++c) {
    Report row = {{"channel", c}};
    summaries[c].Write(&row);
    report["values"].push_back(row);
    if (summaries[c].flat()) findings.push_back(absl::StrCat("channel ", c, " is flat: always ", summaries[c].mean()));
    if (summaries[c].clipped() > kClippedFraction) findings.push_back(absl::StrCat("channel ", c, " stands at its least or greatest value in ", 100 * summaries[c].clipped(), "% of its points: clipped?"));
    if (summaries[c].not_finite() > 0) {
      findings.push_back(absl::StrCat("channel ", c, " has ", summaries[c].not_finite(), " NaN or infinite values"));
      holes = true;
    }
  }
  if (holes) findings.push_back("a NaN ends the job, unless data.missing is zero or hold; an infinite value always does (data.on_error: skip leaves its sample out)");
  report["findings"] = findings;
  report["job_yaml"] = absl::StrCat("  model:\n    in_chans: ", channels, "\n    input_size: [", absl::StrJoin(source->axes(), ", "), "]\n  data:\n    source: ", source_name, "\n    path: ",
                                    Printable(options.path, 4096), source->axes().size() == 1 ? "\n    normalize: channel\n" : "\n",
                                    holes ? "    missing: zero   # or hold, the value before\n" : "");
  return report;
}

}  // namespace hierad
