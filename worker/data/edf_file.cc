#include "worker/data/edf_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/job_paths.h"
#include "base/limits.h"
#include "base/status.h"
#include "worker/data/data_file.h"

namespace hierad {
namespace {

constexpr int64_t kSpanBytes = 16 << 20;   // of records read at once; beyond, only the bytes of the wanted signals

// `count` little-endian samples to physical values.
void Decode(const uint8_t* bytes, int sample_bytes, int64_t count, double gain, double zero, float* out) {
  if (sample_bytes == 2) {
    for (int64_t i = 0; i < count; ++i) {
      int16_t value;
      std::memcpy(&value, bytes + 2 * i, 2);
      out[i] = static_cast<float>(value * gain + zero);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* p = bytes + 3 * i;
      const int32_t value = static_cast<int32_t>(uint32_t{p[0]} << 8 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 24) >> 8;
      out[i] = static_cast<float>(value * gain + zero);
    }
  }
}

}  // namespace

absl::StatusOr<EdfFile> EdfFile::Open(const std::string& path, bool keep_open) {
  EdfFile file;
  file.path_ = path;
  file.name_ = Printable(path);
  ASSIGN_OR_RETURN(file.fd_, OpenJobPath(path, O_RDONLY));
  struct stat status;
  if (fstat(file.fd_.get(), &status) != 0) return ErrnoStatus(errno, "cannot stat", path);
  if (!S_ISREG(status.st_mode)) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name_, " is not a regular file"));
  std::string begin(std::min<int64_t>(status.st_size, 256), '\0');
  RETURN_IF_ERROR(ReadDataFile(file.fd_.get(), 0, begin.size(), file.name_, begin.data()));
  begin.resize(std::max<int64_t>(begin.size(), std::min<int64_t>(status.st_size, EdfHeaderBytes(begin))));
  RETURN_IF_ERROR(ReadDataFile(file.fd_.get(), 0, begin.size(), file.name_, begin.data()));
  ASSIGN_OR_RETURN(file.header_, ParseEdfHeader(begin, status.st_size, file.name_));
  RETURN_IF_ERROR(file.ReadAnnotations());
  if (!keep_open) file.fd_.reset();
  return file;
}

absl::Status EdfFile::ReadAnnotations() {
  std::vector<double> onsets;   // of the records, where they are told
  std::string bytes;
  const bool any = std::any_of(header_.signals.begin(), header_.signals.end(), [](const EdfSignal& signal) { return signal.annotations; });
  for (int64_t record = 0; any && record < header_.records; ++record) {
    bool first = true;
    for (const EdfSignal& signal : header_.signals) {
      if (!signal.annotations) continue;
      bytes.resize(signal.samples * header_.sample_bytes);
      RETURN_IF_ERROR(ReadDataFile(fd_.get(), header_.header_bytes + record * header_.record_bytes + signal.offset, bytes.size(), name_, bytes.data()));
      const auto onset = ParseAnnotations(bytes, &annotations_);
      if (first && onset && static_cast<int64_t>(onsets.size()) == record) onsets.push_back(*onset);
      first = false;
    }
    if (static_cast<int64_t>(annotations_.size()) > limits::kEdfAnnotations)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name_, ": more than ", limits::kEdfAnnotations, " annotations"));
  }
  return FindSegments(onsets);
}

absl::Status EdfFile::FindSegments(const std::vector<double>& onsets) {
  if (!header_.has_samples()) return absl::OkStatus();
  if (!header_.discontinuous) {
    segments_.push_back({0, header_.records, onsets.empty() ? 0.0 : onsets[0]});
    return absl::OkStatus();
  }
  if (static_cast<int64_t>(onsets.size()) < header_.records)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name_, ": record ", onsets.size(), " at byte ", header_.header_bytes + static_cast<int64_t>(onsets.size()) * header_.record_bytes, " has no time stamp, which ", header_.kind, " needs in every record"));
  double fastest = 0;
  for (const EdfSignal& signal : header_.signals)
    if (!signal.annotations) fastest = std::max(fastest, header_.rate(signal));
  const double tolerance = 0.5 / fastest;
  for (int64_t record = 0; record < header_.records; ++record) {
    const bool follows = !segments_.empty() &&
                         std::abs(onsets[record] - segments_.back().onset_s - double(segments_.back().records) * header_.duration_s()) <= tolerance;
    if (follows) ++segments_.back().records;
    else segments_.push_back({record, 1, onsets[record]});
  }
  return absl::OkStatus();
}

absl::Status EdfFile::Read(const Segment& segment, const std::vector<Piece>& pieces) const {
  UniqueFd opened;
  if (!fd_) {
    ASSIGN_OR_RETURN(opened, ReopenDataFile(path_, name_));
  }
  const int fd = fd_ ? fd_.get() : opened.get();
  int64_t first = segment.records, last = -1;   // records of the segment, that hold anything
  for (const Piece& piece : pieces) {
    if (piece.count <= 0) continue;
    const int64_t samples = header_.signals[piece.signal].samples;
    first = std::min(first, piece.begin / samples);
    last = std::max(last, (piece.begin + piece.count - 1) / samples);
  }
  if (last < first) return absl::OkStatus();
  if (first < 0 || last >= segment.records) return absl::InternalError(absl::StrCat(name_, ": records ", first, " to ", last, " of a segment of ", segment.records));
  const int64_t start = header_.header_bytes + segment.first_record * header_.record_bytes;
  std::unique_ptr<uint8_t[]> span;
  const int64_t span_bytes = (last - first + 1) * header_.record_bytes;
  if (span_bytes <= kSpanBytes) {
    span.reset(new uint8_t[span_bytes]);
    RETURN_IF_ERROR(ReadDataFile(fd, start + first * header_.record_bytes, span_bytes, name_, span.get()));
  }
  std::vector<uint8_t> part;
  for (const Piece& piece : pieces) {
    const EdfSignal& signal = header_.signals[piece.signal];
    const double gain = signal.gain(), zero = signal.physical_min - signal.digital_min * gain;
    for (int64_t done = 0; done < piece.count;) {
      const int64_t record = (piece.begin + done) / signal.samples, at = (piece.begin + done) % signal.samples;
      const int64_t run = std::min(piece.count - done, signal.samples - at), bytes = run * header_.sample_bytes;
      const int64_t offset = signal.offset + at * header_.sample_bytes;
      const uint8_t* source = span ? span.get() + (record - first) * header_.record_bytes + offset : nullptr;
      if (!span) {
        part.resize(bytes);
        RETURN_IF_ERROR(ReadDataFile(fd, start + record * header_.record_bytes + offset, bytes, name_, part.data()));
        source = part.data();
      }
      Decode(source, header_.sample_bytes, run, gain, zero, piece.out + done);
      done += run;
    }
  }
  return absl::OkStatus();
}

}  // namespace hierad
