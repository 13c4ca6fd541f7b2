#include "base/attempt_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <vector>

#include "base/fs.h"
#include "base/fs_descriptor.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr std::string_view kMark = "---- job ";
constexpr size_t kLineBytes = 512;         // a longer one is no attempt's
constexpr size_t kBlockBytes = 256 << 10;
constexpr int kTries = 5;                  // the log is emptied once in 256 MiB

// One file of the log, open.
struct File {
  UniqueFd fd;
  int64_t size = 0;
  std::string head;

  bool Holds(const LogCursor& cursor) const {
    return !cursor.head.empty() && head.compare(0, cursor.head.size(), cursor.head) == 0 && cursor.offset <= size;
  }
};

std::string HeadOf(int fd) {
  std::string head(kLogHeadBytes, '\0');
  const ssize_t got = pread(fd, head.data(), head.size(), 0);
  head.resize(size_t(std::max<ssize_t>(0, got)));
  return head;
}

absl::StatusOr<File> Open(const std::string& path) {
  File file;
  ASSIGN_OR_RETURN(file.fd, OpenRegularIn(AT_FDCWD, path, O_RDONLY, 0, path));
  struct stat info;
  if (fstat(file.fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot read the log", path);
  if (info.st_size > limits::kLogReadBytes) {
    return absl::FailedPreconditionError("the log \"" + Printable(path) + "\" has " + std::to_string(info.st_size) + " bytes, and no more than " +
                                         std::to_string(limits::kLogReadBytes) + " (4 GiB) are read, more than an agent lets a rank's log grow to "
                                         "(--log-bytes); look at it by other means, or remove it");
  }
  file.size = info.st_size;
  file.head = HeadOf(file.fd.get());
  return file;
}

// Where the last `lines` lines of [begin, end) begin, and how many they are; an unfinished last one counts.
struct Tail {
  int64_t offset;
  uint64_t lines;
};
Tail TailOf(int fd, int64_t begin, int64_t end, uint64_t lines) {
  std::string block(kBlockBytes, '\0');
  uint64_t seen = 0;
  for (int64_t stop = end; stop > begin;) {
    const int64_t start = std::max(begin, stop - int64_t(block.size()));
    const ssize_t got = pread(fd, block.data(), size_t(stop - start), start);
    if (got <= 0) return {start, seen};
    for (int64_t i = got - 1; i >= 0; --i) {
      if (block[size_t(i)] != '\n' || start + i == end - 1) continue;   // the last byte ends the last line
      if (++seen == lines) return {start + i + 1, lines};
    }
    stop = start;
  }
  return {begin, end > begin ? seen + 1 : 0};
}

struct Mark {
  int64_t offset;
  AttemptLine line;
};
// The first attempt's line that is wanted and begins in [begin, end). What the file has not yet of a line is taken for none.
template <typename Wanted>
std::optional<Mark> FindMark(const File& file, int64_t begin, int64_t end, const Wanted& wanted) {
  std::string block;
  const int64_t stop = std::min<int64_t>(file.size, end + int64_t(kLineBytes) + 1);
  for (int64_t start = std::max<int64_t>(0, begin - 1); start < stop;) {
    block.resize(size_t(std::min<int64_t>(kBlockBytes, stop - start)));
    const ssize_t got = pread(file.fd.get(), block.data(), block.size(), start);
    if (got <= 0) return std::nullopt;
    block.resize(size_t(got));
    for (size_t at = block.find(kMark); at != std::string::npos; at = block.find(kMark, at + 1)) {
      const bool line_begins = at == 0 ? start == 0 : block[at - 1] == '\n';
      const int64_t offset = start + int64_t(at);
      if (!line_begins || offset < begin) continue;
      if (offset >= end) return std::nullopt;
      const size_t line_end = block.find('\n', at);
      const bool whole = line_end != std::string::npos || start + got == file.size;
      if (!whole) continue;   // it comes again with the next block
      const auto parsed = ParseAttemptLine(std::string_view(block).substr(at, line_end == std::string::npos ? line_end : line_end - at));
      if (parsed && wanted(*parsed)) return Mark{offset, *parsed};
    }
    if (start + got >= stop) break;
    start += std::max<int64_t>(1, got - int64_t(kLineBytes) - 1);
  }
  return std::nullopt;
}

// A place in the files: which, and where in it.
struct Place {
  size_t file = 0;
  int64_t offset = 0;
};

class Reader {
 public:
  Reader(std::vector<File> files, const LogAsk& ask) : files_(std::move(files)), ask_(ask) {}

  absl::StatusOr<LogSlice> Read() const {
    const std::optional<Place> from = Locate(ask_.from);
    if (ask_.find) {
      auto found = Find(from);
      return from && absl::IsNotFound(found.status()) ? Find(std::nullopt) : found;
    }
    if (from) return Slice(*from);
    // The file that it was in is gone: all that there is, is newer.
    auto rest = Find(std::nullopt);
    if (rest.ok()) rest->gap = true;
    if (!absl::IsNotFound(rest.status())) return rest;
    LogSlice nothing;
    nothing.at = ask_.from;
    nothing.ended = nothing.gap = files_.front().size > 0;
    return nothing;
  }

 private:
  bool Ours(const AttemptLine& line) const { return line.job_id == ask_.job_id && line.attempt == ask_.attempt; }

  std::optional<Place> Locate(const LogCursor& cursor) const {
    for (size_t i = files_.size(); i-- > 0;) {
      if (files_[i].Holds(cursor)) return Place{i, cursor.offset};
    }
    return std::nullopt;
  }

  // The next attempt's line at or after a place that is wanted.
  template <typename Wanted>
  std::optional<std::pair<Place, AttemptLine>> Next(Place place, const Wanted& wanted) const {
    for (; place.file < files_.size(); ++place.file, place.offset = 0) {
      const File& file = files_[place.file];
      if (const auto mark = FindMark(file, place.offset, file.size, wanted)) return std::pair(Place{place.file, mark->offset}, mark->line);
    }
    return std::nullopt;
  }

  absl::StatusOr<LogSlice> Find(const std::optional<Place>& from) const {
    std::optional<Place> start;
    bool gap = false;
    const Place at = from.value_or(Place());
    const auto first = Next(at, [](const AttemptLine&) { return true; });
    // What stands before the first such line goes with it.
    if (!from && (!first || Ours(first->second)) && files_.front().size > 0) {
      start = Place();
      gap = first && (first->second.continued || first->first.file > 0 || first->first.offset > 0);
    } else if (const auto own = Next(at, [this](const AttemptLine& line) { return Ours(line); })) {
      start = own->first;
      gap = own->second.continued;
    }
    if (!start) return absl::NotFoundError("no line of attempt " + std::to_string(ask_.attempt) + " is in the log");
    if (ask_.tail_lines == 0) {
      ASSIGN_OR_RETURN(LogSlice slice, Slice(*start));
      slice.gap = gap;
      return slice;
    }
    const Place end = EndOf(*start);
    uint64_t lines = 0;
    Place tail = end;
    for (size_t i = end.file + 1; i-- > start->file && lines < ask_.tail_lines;) {
      const Tail found = TailOf(files_[i].fd.get(), i == start->file ? start->offset : 0, i == end.file ? end.offset : files_[i].size, ask_.tail_lines - lines);
      lines += found.lines;
      tail = {i, found.offset};
    }
    ASSIGN_OR_RETURN(LogSlice slice, Slice(tail));
    slice.lines = lines;
    slice.gap = gap && lines < ask_.tail_lines;
    return slice;
  }

  // Where another attempt's lines follow, or the log ends.
  Place EndOf(const Place& start) const {
    const auto next = Next(start, [this](const AttemptLine& line) { return !Ours(line); });
    if (next) return next->first;
    return {files_.size() - 1, files_.back().size};
  }

  absl::StatusOr<LogSlice> Slice(Place place) const {
    if (place.offset == files_[place.file].size && place.file + 1 < files_.size() && files_[place.file + 1].size > 0) place = {place.file + 1, 0};
    const File& file = files_[place.file];
    LogSlice slice;
    slice.at = {file.head, place.offset};
    slice.bytes.resize(size_t(std::min<int64_t>(limits::kLogChunkBytes, file.size - place.offset)));
    const ssize_t got = pread(file.fd.get(), slice.bytes.data(), slice.bytes.size(), place.offset);
    if (got < 0) return ErrnoStatus(errno, "cannot read", "the log");
    slice.bytes.resize(size_t(got));
    // Whole lines, so that no attempt's line is cut in two.
    const size_t last = slice.bytes.rfind('\n');
    if (place.offset + got < file.size && last != std::string::npos) slice.bytes.resize(last + 1);
    const int64_t end = place.offset + int64_t(slice.bytes.size());
    if (const auto other = FindMark(file, place.offset, end, [this](const AttemptLine& line) { return !Ours(line); })) {
      slice.bytes.resize(size_t(other->offset - place.offset));
      slice.ended = true;
    }
    return slice;
  }

  const std::vector<File> files_;   // oldest first
  const LogAsk& ask_;
};

}  // namespace

std::string RankLogName(int rank) { return "rank-" + std::to_string(rank) + ".log"; }

std::string RankLogPath(const std::string& run_folder, int rank) { return JoinPath(run_folder, RankLogName(rank)); }

std::string AttemptLineText(uint64_t job_id, int attempt, int rank, const std::string& slot, int64_t unix_ms, bool continued) {
  char when[32] = "";
  const std::time_t seconds = unix_ms / 1000;
  std::tm parts{};
  std::strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S UTC", gmtime_r(&seconds, &parts));
  return std::string(kMark) + std::to_string(job_id) + ", attempt " + std::to_string(attempt) + ", rank " + std::to_string(rank) + ", " + slot + ", " + when +
         (continued ? ", continued" : "");
}

std::optional<AttemptLine> ParseAttemptLine(std::string_view line) {
  if (line.size() > kLineBytes || !line.starts_with(kMark)) return std::nullopt;
  AttemptLine parsed;
  unsigned long long job = 0;
  int rank = 0, end = 0;
  const std::string text(line);
  if (std::sscanf(text.c_str(), "---- job %llu, attempt %d, rank %d,%n", &job, &parsed.attempt, &rank, &end) != 3 || end == 0) return std::nullopt;
  parsed.job_id = job;
  parsed.continued = line.ends_with(", continued");
  return parsed;
}

absl::StatusOr<LogSlice> ReadAttemptLog(const std::string& run_folder, int rank, const LogAsk& ask) {
  const std::string path = RankLogPath(run_folder, rank);
  for (int tries = 1;; ++tries) {
    ASSIGN_OR_RETURN(File now, Open(path));
    auto old = Open(path + ".1");
    if (!old.ok() && !absl::IsNotFound(old.status())) return old.status();
    const int fd = now.fd.get();
    const std::string head = now.head;
    std::vector<File> files;
    // One that begins as the log does is its copy in the making; the log itself is whole still.
    if (old.ok() && old->size > 0 && head.compare(0, old->head.size(), old->head) != 0) files.push_back(*std::move(old));
    files.push_back(std::move(now));
    const Reader reader(std::move(files), ask);
    auto slice = reader.Read();
    // Emptied meanwhile: what was read may be of two files.
    if (HeadOf(fd).compare(0, head.size(), head) == 0 || tries == kTries) return slice;
  }
}

}  // namespace hierad
