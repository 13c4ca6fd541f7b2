#include "worker/data/edf_header.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr int64_t kFixedBytes = 256;   // the general part, and each signal's
constexpr int64_t kSampleLimit = 1 << 28;

absl::Status Damaged(const std::string& path, const std::string& problem) {
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(path, ": ", problem));
}

std::string_view Trim(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\0' || c == '\t' || c == '\r' || c == '\n'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

// Some writers use their country's comma.
std::optional<double> Number(std::string_view field) {
  std::string text(Trim(field));
  std::replace(text.begin(), text.end(), ',', '.');
  const char* begin = text.data() + (!text.empty() && text[0] == '+');
  double value = 0;
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> Whole(std::string_view field) {
  const auto value = Number(field);
  if (!value || *value != std::floor(*value) || std::abs(*value) > 1e15) return std::nullopt;
  return static_cast<int64_t>(*value);
}

// "0.9999" -> 9999 ticks of 1/10000 s, exactly.
bool Ticks(std::string_view field, EdfHeader* header) {
  const auto value = Number(field);
  if (!value || *value < 0 || *value > 1e8) return false;
  int64_t per_s = 1;
  double ticks = *value;
  while (per_s < 100'000'000 && std::abs(ticks - std::round(ticks)) > 1e-6) {
    per_s *= 10;
    ticks = *value * double(per_s);
  }
  header->ticks_per_s = per_s;
  header->duration_ticks = static_cast<int64_t>(std::round(ticks));
  return true;
}

class HeaderReader {
 public:
  HeaderReader(std::string_view begin, int64_t file_bytes, const std::string& path) : text_(begin), file_bytes_(file_bytes), path_(path) {}

  absl::StatusOr<EdfHeader> Read() {
    RETURN_IF_ERROR(General());
    RETURN_IF_ERROR(Signals());
    RETURN_IF_ERROR(Records());
    return std::move(header_);
  }

 private:
  std::string_view Field(int64_t offset, int64_t size) const { return text_.substr(offset, size); }
  absl::Status Bad(int64_t offset, int64_t size, const std::string& what, const std::string& needed) const {
    return Damaged(path_, absl::StrCat(what, " at byte ", offset, " is '", Printable(Trim(Field(offset, size)), 40), "'; ", needed));
  }

  absl::Status General() {
    const bool bdf = text_[0] == '\xFF';
    if (!bdf && Trim(Field(0, 8)) != "0") return Damaged(path_, absl::StrCat("neither EDF nor BDF (it begins with '", Printable(Field(0, 8)), "')"));
    header_.sample_bytes = bdf ? 3 : 2;
    const std::string_view reserved = Trim(Field(192, 44));
    const bool plus = reserved.substr(0, 4) == "EDF+" || reserved.substr(0, 4) == "BDF+";
    header_.discontinuous = plus && reserved.substr(4, 1) == "D";
    header_.kind = absl::StrCat(bdf ? "BDF" : "EDF", plus ? header_.discontinuous ? "+D" : "+C" : "");
    header_.start = absl::StrCat(ToUtf8(Trim(Field(168, 8))), " ", ToUtf8(Trim(Field(176, 8))));
    const auto signals = Whole(Field(252, 4));
    if (!signals || *signals < 1 || *signals > limits::kEdfSignals) return Bad(252, 4, "the number of signals", absl::StrCat("1 to ", limits::kEdfSignals, " are read"));
    header_.header_bytes = kFixedBytes * (*signals + 1);
    const auto said = Whole(Field(184, 8));
    if (!said || *said != header_.header_bytes) return Bad(184, 8, "the header's size", absl::StrCat(*signals, " signals have ", header_.header_bytes));
    if (static_cast<int64_t>(text_.size()) < header_.header_bytes)
      return Damaged(path_, absl::StrCat("cut inside the header: ", header_.header_bytes, " bytes are needed, ", text_.size(), " are there"));
    if (!Ticks(Field(244, 8), &header_)) return Bad(244, 8, "the duration of a record", "seconds are needed, 0 or more");
    header_.signals.resize(*signals);
    return absl::OkStatus();
  }

  absl::Status Signals() {
    const int64_t n = header_.signals.size();
    int64_t column = kFixedBytes;
    // Where a signal's value of the next column, `width` bytes wide, stands.
    const auto next = [&](int64_t width) {
      const int64_t at = column;
      column += width * n;
      return at;
    };
    const int64_t labels = next(16), transducers = next(80), units = next(8), physical_min = next(8), physical_max = next(8),
                  digital_min = next(8), digital_max = next(8), filters = next(80), samples = next(8);
    (void)transducers, (void)filters;
    for (int64_t i = 0; i < n; ++i) {
      EdfSignal& signal = header_.signals[i];
      signal.label = ToUtf8(Trim(Field(labels + 16 * i, 16)));
      signal.unit = ToUtf8(Trim(Field(units + 8 * i, 8)));
      signal.annotations = signal.label == "EDF Annotations" || signal.label == "BDF Annotations";
      const auto count = Whole(Field(samples + 8 * i, 8));
      if (!count || *count < 0 || *count > kSampleLimit || (*count == 0 && !signal.annotations))
        return Bad(samples + 8 * i, 8, absl::StrCat("the samples in a record of signal ", i, " ('", Printable(signal.label, 40), "')"), absl::StrCat("1 to ", kSampleLimit, " are read"));
      signal.samples = *count;
      signal.offset = header_.record_bytes;
      header_.record_bytes += *count * header_.sample_bytes;
      if (header_.record_bytes > limits::kEdfRecordBytes)
        return Damaged(path_, absl::StrCat("records of more than ", limits::kEdfRecordBytes, " bytes (signal ", i, " has ", *count, " samples in one)"));
      Scale({Field(physical_min + 8 * i, 8), Field(physical_max + 8 * i, 8), Field(digital_min + 8 * i, 8), Field(digital_max + 8 * i, 8)}, &signal);
      if (header_.duration_ticks == 0 && !signal.annotations)
        return Damaged(path_, absl::StrCat("records last 0 s, but signal ", i, " ('", Printable(signal.label, 40), "') has ", *count, " samples in each: its rate is unknown"));
    }
    return absl::OkStatus();
  }

  // A signal that nobody asks for may lack it.
  static void Scale(const std::vector<std::string_view>& fields, EdfSignal* signal) {
    static constexpr const char* kNames[] = {"physical minimum", "physical maximum", "digital minimum", "digital maximum"};
    double* values[] = {&signal->physical_min, &signal->physical_max, &signal->digital_min, &signal->digital_max};
    for (int k = 0; k < 4; ++k) {
      const auto value = Number(fields[k]);
      if (!value && signal->scale_problem.empty()) signal->scale_problem = absl::StrCat("its ", kNames[k], " is '", Printable(Trim(fields[k]), 40), "', not a number");
      *values[k] = value.value_or(0);
    }
    if (!signal->scale_problem.empty()) return;
    if (signal->digital_min == signal->digital_max) signal->scale_problem = absl::StrCat("its digital minimum and maximum are both ", signal->digital_min);
    else if (signal->physical_min == signal->physical_max) signal->scale_problem = absl::StrCat("its physical minimum and maximum are both ", signal->physical_min);
  }

  absl::Status Records() {
    if (header_.record_bytes == 0) return Damaged(path_, "records of 0 bytes");
    const int64_t data = file_bytes_ - header_.header_bytes, rest = data % header_.record_bytes;
    header_.records = data / header_.record_bytes;
    const auto said = Whole(Field(236, 8));
    const std::string announced = said ? absl::StrCat(*said) : absl::StrCat("'", Printable(Trim(Field(236, 8)), 20), "'");
    if (!said || *said != header_.records || rest != 0)
      header_.warnings.push_back(absl::StrCat("the header announces ", announced, said == -1 ? " (not known)" : "", " records, the file holds ", header_.records, rest ? absl::StrCat(" and ", rest, " bytes of one that is cut, which are left out") : ""));
    if (header_.records == 0) return Damaged(path_, absl::StrCat("0 whole records of ", header_.record_bytes, " bytes in ", data, " bytes of data (the header announces ", announced, ")"));
    return absl::OkStatus();
  }

  const std::string_view text_;
  const int64_t file_bytes_;
  const std::string& path_;
  EdfHeader header_;
};

}  // namespace

bool EdfHeader::has_samples() const {
  return std::any_of(signals.begin(), signals.end(), [](const EdfSignal& signal) { return !signal.annotations; });
}

int64_t EdfHeaderBytes(std::string_view begin) {
  if (static_cast<int64_t>(begin.size()) < kFixedBytes) return 0;
  const auto signals = Whole(begin.substr(252, 4));
  return !signals || *signals < 1 || *signals > limits::kEdfSignals ? 0 : kFixedBytes * (*signals + 1);
}

absl::StatusOr<EdfHeader> ParseEdfHeader(std::string_view begin, int64_t file_bytes, const std::string& path) {
  if (static_cast<int64_t>(begin.size()) < kFixedBytes) return Damaged(path, absl::StrCat("neither EDF nor BDF: it has ", file_bytes, " bytes, a header has at least 512"));
  return HeaderReader(begin, file_bytes, path).Read();
}

std::optional<double> ParseAnnotations(std::string_view bytes, std::vector<EdfAnnotation>* annotations) {
  std::optional<double> record_onset;
  bool first = true;
  while (!bytes.empty()) {
    const size_t end = std::min(bytes.find('\0'), bytes.size());
    std::string_view list = bytes.substr(0, end);   // onset [\x15 duration] \x14 text \x14 text \x14
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
    const size_t stamp_end = list.find('\x14');
    if (stamp_end == std::string_view::npos) continue;   // blanks behind the last one
    const std::string_view stamp = list.substr(0, stamp_end);
    const size_t mark = stamp.find('\x15');
    const auto onset = Number(stamp.substr(0, mark));
    const auto duration = mark == std::string_view::npos ? std::optional<double>(0) : Number(stamp.substr(mark + 1));
    if (!onset) continue;
    list.remove_prefix(stamp_end + 1);
    if (first && (list.empty() || list.front() == '\x14')) record_onset = onset;
    first = false;
    while (!list.empty()) {
      const size_t text_end = std::min(list.find('\x14'), list.size());
      const std::string_view text = Trim(list.substr(0, text_end));
      list.remove_prefix(std::min(text_end + 1, list.size()));
      if (!text.empty()) annotations->push_back({*onset, std::max(0.0, duration.value_or(0)), ToUtf8(text)});
    }
  }
  return record_onset;
}

std::string ToUtf8(std::string_view text) {
  if (IsUtf8(text)) return std::string(text);
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      out += c;
    } else {
      out += static_cast<char>(0xC0 | byte >> 6);
      out += static_cast<char>(0x80 | (byte & 0x3F));
    }
  }
  return out;
}

}  // namespace hierad
