// Numbers, times, tables and bars as text for people. Pure; nothing here knows a terminal or a job.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hierad {

std::string DurationText(double seconds);           // "4.2 s", "3 min 12 s", "5 h 02 min", "3 d 04 h"; not finite: "?"
std::string BytesText(int64_t bytes);               // "512 B", "9.1 MiB"
std::string CountText(double value);                // samples per second, parameters: "12.3", "4,096", "70.1 M"
std::string NumberText(double value);               // losses, rates: four significant digits; "NaN", "Infinity"
std::string LocalTime(int64_t unix_ms);             // "2026-11-30 16:11:10"; 0: "-"

size_t Columns(std::string_view text);              // code points; colour sequences take none
std::string Cut(std::string_view text, size_t columns);   // at most so many, "…" or "." at the end when cut

std::string Bar(double fraction, int columns, bool unicode);
// The values as bars of a height each, averaged down to at most `columns` places; a place with a NaN or Inf shows as
// "×" ("x"). Empty: "".
std::string Sparkline(const std::vector<double>& values, size_t columns, bool unicode);

enum class Color { kNone, kRed, kGreen, kYellow, kCyan, kBold, kDim };
std::string Painted(std::string_view text, Color color, bool on);

// A table with a heading; columns are as wide as their widest cell. The last cell of a row may be of any length.
class Table {
 public:
  explicit Table(std::vector<std::string> heading);
  // `right`: which columns are aligned right (numbers).
  void AlignRight(std::vector<size_t> columns);
  void Add(std::vector<std::string> row);
  std::string Text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> right_;
};

}  // namespace hierad
