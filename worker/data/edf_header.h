// Headers and annotations of EDF, EDF+ and BDF recordings: fixed-width text, then data records of 16-bit (BDF: 24-bit)
// integers. Text that nothing depends on never stops a read; numbers that lie do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace hierad {

struct EdfSignal {
  std::string label, unit;           // UTF-8, without the blanks around
  double physical_min = 0, physical_max = 0, digital_min = 0, digital_max = 0;
  std::string scale_problem;         // why these four give no scale; empty: they do
  int64_t samples = 0;               // in a record
  int64_t offset = 0;                // bytes from the record's start
  bool annotations = false;          // text, not samples
  double gain() const { return (physical_max - physical_min) / (digital_max - digital_min); }
};

struct EdfHeader {
  std::string kind;                  // "EDF", "EDF+C", "EDF+D", "BDF", "BDF+C", "BDF+D"
  std::string start;                 // date and time as written; for people
  int sample_bytes = 2;
  bool discontinuous = false;
  int64_t header_bytes = 0, record_bytes = 0;
  int64_t records = 0;               // whole ones in the file, whatever the header says
  int64_t duration_ticks = 0, ticks_per_s = 1;   // of a record, exactly
  std::vector<EdfSignal> signals;
  std::vector<std::string> warnings; // a sentence each
  double duration_s() const { return double(duration_ticks) / double(ticks_per_s); }
  double rate(const EdfSignal& signal) const { return double(signal.samples) * double(ticks_per_s) / double(duration_ticks); }
  bool has_samples() const;          // a signal other than annotations
};

// Bytes of the whole header by its first 256; 0 where they are none.
int64_t EdfHeaderBytes(std::string_view begin);

// `begin`: the file's beginning, its header at least; `file_bytes`: its whole size; `path`: for messages, printable. What
// cannot be read is DATA_ERROR with the byte where it stands.
absl::StatusOr<EdfHeader> ParseEdfHeader(std::string_view begin, int64_t file_bytes, const std::string& path);

struct EdfAnnotation {
  double onset_s = 0, duration_s = 0;   // from the recording's start
  std::string text;                     // UTF-8
};

// One record's bytes of one annotations signal. Adds its annotations (those with text); the record's own onset, which the
// first entry of the first annotations signal gives, where there is one.
std::optional<double> ParseAnnotations(std::string_view bytes, std::vector<EdfAnnotation>* annotations);

// UTF-8 as it is; other bytes read as Latin-1.
std::string ToUtf8(std::string_view text);

}  // namespace hierad
