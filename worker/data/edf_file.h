// An open EDF, EDF+ or BDF recording: its stretches without a gap, its annotations, its samples. Thread-safe after opening.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "worker/data/edf_header.h"

namespace hierad {

class EdfFile {
 public:
  // Consecutive records that follow each other in time.
  struct Segment {
    int64_t first_record = 0, records = 0;
    double onset_s = 0;   // from the recording's start
  };

  // Reads the header and every annotation. `keep_open` false: each read opens the file anew.
  static absl::StatusOr<EdfFile> Open(const std::string& path, bool keep_open = true);

  const EdfHeader& header() const { return header_; }
  const std::string& name() const { return name_; }          // printable
  const std::vector<Segment>& segments() const { return segments_; }   // empty: no samples
  const std::vector<EdfAnnotation>& annotations() const { return annotations_; }
  // Those of a file beside this one, whose start is the same. Before anything is read.
  void AddAnnotations(const std::vector<EdfAnnotation>& more) { annotations_.insert(annotations_.end(), more.begin(), more.end()); }

  // Samples [begin, begin + count) of each of `signals`, counted from the first record of `segment`, in the header's
  // physical unit. `begins`, `counts` and `out` are parallel to `signals`.
  struct Piece {
    int signal = 0;
    int64_t begin = 0, count = 0;
    float* out = nullptr;
  };
  absl::Status Read(const Segment& segment, const std::vector<Piece>& pieces) const;

 private:
  absl::Status ReadAnnotations();
  absl::Status FindSegments(const std::vector<double>& onsets);

  std::string path_, name_;
  EdfHeader header_;
  UniqueFd fd_;
  std::vector<Segment> segments_;
  std::vector<EdfAnnotation> annotations_;
};

}  // namespace hierad
