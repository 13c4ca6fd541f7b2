#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/data/image_pixels.h"
#include "worker/data_tool/channel_statistics.h"
#include "worker/data_tool/data_tool.h"

namespace hierad {
namespace {

namespace fs = std::filesystem;
constexpr size_t kNamed = 20;   // unreadable files and copies that are named one by one

absl::StatusOr<std::vector<std::string>> ListImages(const std::string& path) {
  std::set<std::string> sorted;
  std::error_code error;
  for (fs::recursive_directory_iterator at(path, fs::directory_options::follow_directory_symlink, error), end; !error && at != end; at.increment(error)) {
    if (at.depth() > 16) at.disable_recursion_pending();
    const std::string name = at->path().filename().string();
    for (const char* kind : {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff"})
      if (name[0] != '.' && absl::EndsWithIgnoreCase(name, kind)) sorted.insert(at->path().string());
  }
  if (error) return absl::InternalError(absl::StrCat("cannot list ", Printable(path), ": ", error.message()));
  return std::vector<std::string>(sorted.begin(), sorted.end());
}

}  // namespace

absl::StatusOr<Report> InspectImages(const InspectOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, ListImages(options.path));
  const int64_t count = files.size(), step = std::max<int64_t>(1, (count + options.samples - 1) / options.samples);
  std::map<std::string, int64_t> classes, kinds, seen;
  std::map<int, int64_t> channel_counts;
  std::vector<ChannelSummary> summaries;
  Report findings = Report::array();
  int64_t read = 0, unreadable = 0, copies = 0, bytes = 0, deep = 0;
  int least[2] = {1 << 30, 1 << 30}, most[2] = {0, 0};
  for (int64_t i = 0; i < count; ++i) {
    const std::string relative = fs::path(files[i]).lexically_relative(options.path).string();
    const size_t slash = relative.find('/');
    if (slash != std::string::npos) ++classes[relative.substr(0, slash)];
    ++kinds[fs::path(relative).extension().string()];
    if (i % step != 0) continue;
    ++read;
    const auto file = ReadFile(files[i], limits::kImageFileBytes);
    DecodeOptions decode;
    decode.channels = 4;   // alpha is counted, too
    const auto image = file.ok() ? DecodeImage(*file, decode) : absl::StatusOr<DecodedImage>(file.status());
    if (!image.ok()) {
      if (++unreadable <= static_cast<int64_t>(kNamed)) findings.push_back(absl::StrCat(Printable(relative), ": ", std::string(image.status().message())));
      continue;
    }
    bytes += file->size();
    deep += IsDeep(*file);
    const auto [at, is_new] = seen.emplace(Sha256Hex(*file), i);
    if (!is_new && ++copies <= static_cast<int64_t>(kNamed)) findings.push_back(absl::StrCat(Printable(relative), " is a copy of ", Printable(fs::path(files[at->second]).lexically_relative(options.path).string())));
    const Pixels& pixels = image->pixels;
    ++channel_counts[pixels.channels];
    const int size[2] = {pixels.height, pixels.width};
    for (int a = 0; a < 2; ++a) least[a] = std::min(least[a], size[a]), most[a] = std::max(most[a], size[a]);
    if (static_cast<int>(summaries.size()) < pixels.channels) summaries.resize(pixels.channels);
    std::vector<float> plane(int64_t{pixels.height} * pixels.width);
    for (int c = 0; c < pixels.channels; ++c) {
      for (size_t p = 0; p < plane.size(); ++p) plane[p] = pixels.values_HWC[p * pixels.channels + c] / 255.0f;
      summaries[c].Add(plane.data(), plane.size());
    }
  }
  Report report;
  report["source"] = "images";
  report["samples"] = count;
  report["read"] = read;
  report["unreadable"] = unreadable;
  report["copies"] = copies;
  if (read > unreadable) {
    report["least_size"] = absl::StrCat(least[1], " x ", least[0]);
    report["greatest_size"] = absl::StrCat(most[1], " x ", most[0]);
    report["of_16_bits"] = deep;
    report["mean_file_bytes"] = bytes / (read - unreadable);
  }
  for (const auto& [kind, files_of] : kinds) report["files"].push_back({{"kind", PrintableSentence(kind, 20)}, {"files", files_of}});
  for (const auto& [name, images] : classes) report["classes"].push_back({{"class", PrintableSentence(name, 60)}, {"samples", images}});
  for (const auto& [channels, images] : channel_counts) report["channels"].push_back({{"channels", channels}, {"images", images}});
  for (size_t c = 0; c < summaries.size(); ++c) {
    Report row = {{"channel", c}};
    summaries[c].Write(&row);
    report["values_of_1"].push_back(row);
    if (summaries[c].flat()) findings.push_back(absl::StrCat("channel ", c, " is flat"));
  }
  if (channel_counts.size() > 1) findings.push_back("images have different numbers of channels: gray and RGB are turned into each other, others are refused where they are not model.in_chans");
  if (deep > 0 && deep < read - unreadable) findings.push_back("images of 8 and of 16 bits: all are read in 16 where one of 16 files looked at has 16, else in 8");
  if (unreadable > static_cast<int64_t>(kNamed)) findings.push_back(absl::StrCat(unreadable, " of the ", read, " files read cannot be used; data.on_error: skip passes over them"));
  report["findings"] = findings;
  const int usual = channel_counts.empty() ? 3 : std::max_element(channel_counts.begin(), channel_counts.end(), [](auto& a, auto& b) { return a.second < b.second; })->first;
  report["job_yaml"] = absl::StrCat("  model:\n    in_chans: ", usual, "\n    input_size: [224, 224]\n  data:\n    source: images\n    path: ", Printable(options.path, 4096), "\n");
  return report;
}

}  // namespace hierad
