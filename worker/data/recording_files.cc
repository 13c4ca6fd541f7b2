#include "worker/data/recording_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/job_paths.h"
#include "base/limits.h"
#include "base/sha256.h"
#include "base/status.h"

namespace hierad {
namespace {

constexpr int kFolderDepth = 16;   // also ends a circle of links

bool IsRecording(const std::string& name) { return absl::EndsWithIgnoreCase(name, ".edf") || absl::EndsWithIgnoreCase(name, ".bdf"); }

// Adds the recordings below root/below, as paths relative to root.
absl::Status Walk(const std::string& root, const std::string& below, int depth, std::vector<std::string>* found, int64_t* others) {
  const std::string folder = below.empty() ? root : JoinPath(root, below);
  if (depth > kFolderDepth) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path: ", Printable(folder), " is more than ", kFolderDepth, " folders deep (a circle of links?)"));
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListJobFolder(folder));
  for (const std::string& name : names) {
    if (name[0] == '.') continue;
    const std::string relative = below.empty() ? name : absl::StrCat(below, "/", name);
    struct stat status{};
    const bool known = StatJobPath(JoinPath(root, relative), &status).ok();
    if (known && S_ISDIR(status.st_mode)) {
      RETURN_IF_ERROR(Walk(root, relative, depth + 1, found, others));
    } else if (IsRecording(name)) {
      found->push_back(relative);   // a broken link is found when it is opened
    } else {
      ++*others;
    }
    if (static_cast<int64_t>(found->size()) > limits::kRecordings) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(root), ": more than ", limits::kRecordings, " recordings"));
  }
  return absl::OkStatus();
}

// What a file's first bytes tell: enough to find out which files belong together.
struct Peek {
  bool only_annotations = false;
  std::string start;   // date and time, as written
};

Peek PeekAt(const std::string& path) {
  constexpr size_t kHeader = 256, kLabel = 16, kSignals = 64;
  constexpr size_t kStartAt = 168, kStartBytes = 16, kCountAt = 252, kCountBytes = 4;
  Peek peek;
  std::string bytes(kHeader + kSignals * kLabel, '\0');
  const auto file = OpenJobPath(path, O_RDONLY);
  const ssize_t got = file.ok() ? pread(file->get(), bytes.data(), bytes.size(), 0) : 0;
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(0, got)));
  if (bytes.size() < kHeader) return peek;   // says so when it is opened
  peek.start = bytes.substr(kStartAt, kStartBytes);
  size_t signals = 0;
  if (!absl::SimpleAtoi(bytes.substr(kCountAt, kCountBytes), &signals) || signals < 1 || signals > kSignals || bytes.size() < kHeader + signals * kLabel) return peek;
  peek.only_annotations = true;
  for (size_t i = 0; i < signals; ++i) {
    const std::string label = bytes.substr(kHeader + i * kLabel, kLabel);
    peek.only_annotations = peek.only_annotations && (label == "EDF Annotations " || label == "BDF Annotations ");
  }
  return peek;
}

size_t CommonPrefix(const std::string& a, const std::string& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// Takes the files that hold annotations only out of `relative` and gives them to their recordings.
absl::Status Join(const std::string& root, std::vector<std::string>* relative, RecordingFiles* files) {
  std::vector<std::string> alone;
  std::map<std::string, std::vector<std::pair<std::string, std::string>>> recordings;   // by folder: name and start
  std::map<std::string, std::string> starts;
  for (const std::string& file : *relative) {
    const Peek peek = PeekAt(JoinPath(root, file));
    if (peek.only_annotations) alone.push_back(file), starts[file] = peek.start;
    else recordings[FolderOf(absl::StrCat("/", file))].emplace_back(file, peek.start);
  }
  for (const std::string& file : alone) {
    size_t longest = 0;
    std::vector<std::string> best;
    for (const auto& [recording, start] : recordings[FolderOf(absl::StrCat("/", file))]) {
      const size_t common = start == starts[file] ? CommonPrefix(recording, file) : 0;
      if (start != starts[file] || common < longest) continue;
      if (common > longest) best.clear();
      longest = common;
      best.push_back(recording);
    }
    if (best.size() > 1)
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path: the annotations of ", Printable(JoinPath(root, file)), " fit ", Printable(best[0], 200), " and ", Printable(best[1], 200), ", which begin at the same time and are named alike; move each pair into a folder of its own"));
    if (best.empty()) files->lone_annotations.push_back(JoinPath(root, file));
    else files->annotations[JoinPath(root, best[0])].push_back(JoinPath(root, file));
  }
  std::erase_if(*relative, [&](const std::string& file) { return starts.contains(file); });
  return absl::OkStatus();
}

std::string SubjectOf(const std::string& relative, bool by_folder) { return by_folder ? FolderOf(absl::StrCat("/", relative)) : relative; }

// Keeps the files of the subjects that `subset` asks for.
absl::Status Choose(const std::string& path, double fraction, bool by_folder, Subset subset, std::vector<std::string>* relative, RecordingFiles* files) {
  std::map<std::string, std::string> hashes;   // hash -> subject
  for (const std::string& file : *relative) {
    const std::string subject = SubjectOf(file, by_folder);
    hashes[Sha256Hex(subject)] = subject;
  }
  files->subjects = hashes.size();
  if (files->subjects < 2)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.held_out is ", fraction, ", but data.path ", Printable(path), " holds ", files->subjects, " subject; give at least 2, or take held_out out"));
  files->held_out = std::clamp<int64_t>(std::llround(fraction * double(files->subjects)), 1, files->subjects - 1);
  std::map<std::string, bool> held;
  int64_t index = 0;
  for (const auto& [hash, subject] : hashes) held[subject] = index++ < files->held_out;
  if (subset != Subset::kAll) std::erase_if(*relative, [&](const std::string& file) { return held[SubjectOf(file, by_folder)] != (subset == Subset::kHeldOut); });
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RecordingFiles> FindRecordings(const std::string& path, double held_out, bool by_folder, Subset subset) {
  RecordingFiles files;
  struct stat status{};
  RETURN_IF_ERROR(StatJobPath(path, &status));
  if (!S_ISDIR(status.st_mode)) {
    if (held_out > 0) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.held_out needs a folder of recordings; data.path ", Printable(path), " is one file"));
    files.paths.push_back(path);
    files.subjects = 1;
    return files;
  }
  std::vector<std::string> relative;
  RETURN_IF_ERROR(Walk(path, "", 0, &relative, &files.other_files));
  if (relative.empty())
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path ", Printable(path), ": 0 recordings (.edf, .bdf) among ", files.other_files, " files; at least 1 is needed"));
  std::sort(relative.begin(), relative.end());
  RETURN_IF_ERROR(Join(path, &relative, &files));
  if (held_out > 0) {
    RETURN_IF_ERROR(Choose(path, held_out, by_folder, subset, &relative, &files));
  } else {
    files.subjects = relative.size();
  }
  for (const std::string& file : relative) files.paths.push_back(JoinPath(path, file));
  return files;
}

}  // namespace hierad
