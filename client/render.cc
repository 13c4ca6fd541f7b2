#include "client/render.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>

#include "base/text.h"

namespace hierad {
namespace {

template <typename... Args>
std::string Format(const char* format, Args... args) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, args...);
  return buffer;
}

}  // namespace

std::string DurationText(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 9.95) return Format("%.1f s", seconds);
  const auto s = static_cast<long long>(std::min(std::llround(seconds), 9'999'999'999ll));
  if (s < 60) return Format("%lld s", s);
  if (s < 3600) return Format("%lld min %02lld s", s / 60, s % 60);
  if (s < 86400) return Format("%lld h %02lld min", s / 3600, s / 60 % 60);
  return Format("%lld d %02lld h", s / 86400, s / 3600 % 24);
}

std::string BytesText(int64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = double(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1023.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return Format("%.1f %s", value, kUnits[unit]);
}

std::string CountText(double value) {
  if (!std::isfinite(value)) return NumberText(value);
  const double size = std::fabs(value);
  if (size >= 1e9) return Format("%.1f G", value / 1e9);
  if (size >= 1e6) return Format("%.1f M", value / 1e6);
  if (size >= 1000) return Format("%d,%03d", int(value) / 1000, std::abs(int(value)) % 1000);
  if (size >= 99.95) return Format("%.0f", value);
  return value == std::floor(value) ? Format("%.0f", value) : Format("%.1f", value);
}

std::string NumberText(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return Format("%.4g", value);
}

std::string LocalTime(int64_t unix_ms) {
  if (unix_ms <= 0) return "-";
  const std::time_t time = unix_ms / 1000;
  std::tm parts{};
  if (::localtime_r(&time, &parts) == nullptr) return "-";
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%d %H:%M:%S", &parts);
  return buffer;
}

namespace {

// Bytes of the escape sequence at the start of `text`, 0: none. Only those that Painted makes come here.
size_t EscapeBytes(std::string_view text) {
  if (text.substr(0, 2) != "\x1b[") return 0;
  const size_t end = text.find('m');
  return end == std::string_view::npos ? text.size() : end + 1;
}

}  // namespace

size_t Columns(std::string_view text) {
  size_t columns = 0;
  while (!text.empty()) {
    if (const size_t escape = EscapeBytes(text)) {
      text.remove_prefix(escape);
      continue;
    }
    text.remove_prefix(FirstRune(text).bytes);
    ++columns;
  }
  return columns;
}

std::string Cut(std::string_view text, size_t columns) {
  if (Columns(text) <= columns) return std::string(text);
  std::string cut;
  bool painted = false;
  for (size_t used = 0; !text.empty();) {
    size_t bytes = EscapeBytes(text);
    if (bytes > 0) {
      painted = true;
    } else {
      if (used + 1 >= columns) break;
      bytes = FirstRune(text).bytes;
      ++used;
    }
    cut += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  if (painted) cut += "\x1b[0m";
  return columns > 0 ? cut + "." : cut;
}

std::string Bar(double fraction, int columns, bool unicode) {
  if (!(fraction >= 0)) fraction = 0;
  const int full = int(std::min(fraction, 1.0) * columns + 1e-9);
  std::string bar;
  for (int i = 0; i < columns; ++i) bar += i < full ? (unicode ? "█" : "#") : (unicode ? "░" : "-");
  return bar;
}

std::string Sparkline(const std::vector<double>& values, size_t columns, bool unicode) {
  static constexpr const char* kBlocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  static constexpr const char* kLetters[] = {"_", ".", ",", "-", "=", "+", "*", "#"};
  const size_t places = std::min(values.size(), columns);
  std::vector<double> means;
  for (size_t i = 0; i < places; ++i) {
    const size_t begin = i * values.size() / places, end = (i + 1) * values.size() / places;
    double sum = 0;   // one NaN or Inf marks its place
    for (size_t k = begin; k < end; ++k) sum += values[k];
    means.push_back(sum / double(end - begin));
  }
  double low = INFINITY, high = -INFINITY;
  for (const double mean : means) {
    if (!std::isfinite(mean)) continue;
    low = std::min(low, mean);
    high = std::max(high, mean);
  }
  std::string line;
  for (const double mean : means) {
    if (!std::isfinite(mean)) {
      line += unicode ? "×" : "x";
      continue;
    }
    const int level = high > low ? std::min(7, int((mean - low) / (high - low) * 8)) : 3;
    line += unicode ? kBlocks[level] : kLetters[level];
  }
  return line;
}

std::string Painted(std::string_view text, Color color, bool on) {
  if (!on || color == Color::kNone) return std::string(text);
  const char* code = color == Color::kRed      ? "31"
                     : color == Color::kGreen  ? "32"
                     : color == Color::kYellow ? "33"
                     : color == Color::kCyan   ? "36"
                     : color == Color::kBold   ? "1"
                                               : "2";
  return "\x1b[" + std::string(code) + "m" + std::string(text) + "\x1b[0m";
}

Table::Table(std::vector<std::string> heading) : right_(heading.size(), false) { rows_.push_back(std::move(heading)); }

void Table::AlignRight(std::vector<size_t> columns) {
  for (const size_t column : columns) right_[column] = true;
}

void Table::Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

std::string Table::Text() const {
  std::vector<size_t> widths(right_.size(), 0);
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], Columns(row[c]));
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string space(widths[c] - Columns(row[c]), ' ');
      line += (c ? "  " : "") + (right_[c] ? space + row[c] : row[c] + space);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace hierad
