#include "client/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "client/plot_drawing.h"
#include "client/render.h"

namespace hierad {
namespace {

struct Range {
  double low = 0, high = 1;
  int64_t first = 0, last = 1;
  bool any = false;   // a finite value
};

Range RangeOf(const std::vector<PlotPoint>& points) {
  Range range;
  if (!points.empty()) {
    range.first = points.front().step;
    range.last = points.back().step;
  }
  double low = INFINITY, high = -INFINITY;
  for (const PlotPoint& p : points) {
    if (!std::isfinite(p.value)) continue;
    low = std::min(low, p.value);
    high = std::max(high, p.value);
    range.any = true;
  }
  if (!range.any) return range;
  // A flat curve runs through the middle.
  const double room = high > low ? 0 : std::max(1e-12, 0.5 * std::fabs(high));
  range.low = low - room;
  range.high = high + room;
  return range;
}

// What is drawn in each of `columns`: the values that fall in it, from the least to the largest, joined to the column before.
struct Span {
  double low = INFINITY, high = -INFINITY;
  bool gap = false;   // something not finite
  bool empty() const { return low > high; }
};

std::vector<Span> Spans(const std::vector<PlotPoint>& points, const Range& range, int columns) {
  std::vector<Span> spans(static_cast<size_t>(columns));
  const double width = double(std::max<int64_t>(1, range.last - range.first));
  double before = NAN;
  int column_before = 0;
  for (const PlotPoint& p : points) {
    const int column = std::clamp(int(double(p.step - range.first) / width * (columns - 1) + 0.5), 0, columns - 1);
    Span& span = spans[size_t(column)];
    if (!std::isfinite(p.value)) {
      span.gap = true;
      before = NAN;
      continue;
    }
    // The way from the point before: a straight line through the columns between.
    for (int c = column_before + 1; std::isfinite(before) && c <= column; ++c) {
      const double from = before + (p.value - before) * (c - 1 - column_before) / (column - column_before);
      const double to = before + (p.value - before) * (c - column_before) / (column - column_before);
      spans[size_t(c)].low = std::min({spans[size_t(c)].low, from, to});
      spans[size_t(c)].high = std::max({spans[size_t(c)].high, from, to});
    }
    span.low = std::min(span.low, p.value);
    span.high = std::max(span.high, p.value);
    before = p.value;
    column_before = column;
  }
  return spans;
}

std::string Format(const char* format, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}

void AppendUtf8(uint32_t code, std::string* out) {   // of the Basic Multilingual Plane, beyond ASCII
  out->push_back(char(0xE0 | code >> 12));
  out->push_back(char(0x80 | ((code >> 6) & 0x3F)));
  out->push_back(char(0x80 | (code & 0x3F)));
}

}  // namespace

std::vector<double> RoundTicks(double low, double high, int count) {
  std::vector<double> ticks;
  const double raw = (high - low) / std::max(1, count);
  if (!(raw > 0) || !std::isfinite(raw)) return {low};
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double step = (raw / power <= 1 ? 1 : raw / power <= 2 ? 2 : raw / power <= 5 ? 5 : 10) * power;
  for (double at = std::ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step; at += step) ticks.push_back(std::fabs(at) < 1e-9 * step ? 0 : at);
  return ticks;
}

std::string PlotText(const Plot& plot, int columns, int rows, bool unicode) {
  constexpr int kScale = 11;   // columns of the scale
  const Range range = RangeOf(plot.points);
  if (!range.any) return plot.title + ": no finite values\n";
  const int wide = std::max(10, columns - kScale - 1), across = unicode ? 2 : 1, down = unicode ? 4 : 1;
  const int dots_x = wide * across, dots_y = rows * down;
  std::vector<uint8_t> cells(size_t(wide) * size_t(rows), 0);
  // Dots of a braille character: 1 4 / 2 5 / 3 6 / 7 8.
  static constexpr uint8_t kDots[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
  const std::vector<Span> spans = Spans(plot.points, range, dots_x);
  const auto row_of = [&](double v) { return std::clamp(int((range.high - v) / (range.high - range.low) * (dots_y - 1) + 0.5), 0, dots_y - 1); };
  std::string gaps(size_t(wide), ' ');
  bool any_gap = false;
  for (int x = 0; x < dots_x; ++x) {
    const Span& span = spans[size_t(x)];
    if (span.gap) gaps[size_t(x / across)] = 'x', any_gap = true;
    if (span.empty()) continue;
    for (int y = row_of(span.high); y <= row_of(span.low); ++y) cells[size_t(y / down) * size_t(wide) + size_t(x / across)] |= kDots[y % down][x % across];
  }
  std::string text = Cut(plot.title, size_t(columns)) + "\n";
  for (int row = 0; row < rows; ++row) {
    const bool labelled = row == 0 || row == rows - 1 || row == rows / 2;
    const double at = range.high - (range.high - range.low) * row / std::max(1, rows - 1);
    std::string label = labelled ? NumberText(at) : "";
    text += std::string(size_t(std::max(0, kScale - 1 - int(label.size()))), ' ') + label + (unicode ? " │" : " |");
    std::string line;
    for (int x = 0; x < wide; ++x) {
      const uint8_t cell = cells[size_t(row) * size_t(wide) + size_t(x)];
      if (unicode && cell != 0) AppendUtf8(0x2800u + cell, &line);
      else line += cell != 0 ? '*' : ' ';
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  if (any_gap) {
    gaps.erase(gaps.find_last_not_of(' ') + 1);
    text += std::string(kScale - 4, ' ') + "NaN " + (unicode ? "│" : "|") + gaps + "\n";
  }
  const std::string first = std::to_string(range.first), last = std::to_string(range.last);
  const int between = wide - int(first.size()) - int(last.size());
  text += std::string(kScale + 1, ' ') + first + std::string(size_t(std::max(1, between)), ' ') + last + "\n";
  return text;
}

Drawing DrawPlot(const Plot& plot) {
  constexpr int kLeft = 80, kRight = 20, kTop = 40, kBottom = 50;
  constexpr int kAcross = Drawing::kWidth - kLeft - kRight, kDown = Drawing::kHeight - kTop - kBottom;
  constexpr uint32_t kGrid = 0xDDDDDD, kGap = 0xC0392B;
  const Range range = RangeOf(plot.points);
  Drawing drawing;
  const auto text = [&drawing](double x, double y, Anchor anchor, const std::string& words, bool large = false) { drawing.texts.push_back({x, y, anchor, words, large}); };
  text(kLeft, 24, Anchor::kStart, plot.title, /*large=*/true);
  if (!range.any) {
    text(Drawing::kWidth / 2.0, Drawing::kHeight / 2.0, Anchor::kMiddle, "no finite values");
    return drawing;
  }
  const double room = 0.04 * (range.high - range.low), low = range.low - room, high = range.high + room;
  const auto x_of = [&](double step) { return kLeft + kAcross * (step - double(range.first)) / double(std::max<int64_t>(1, range.last - range.first)); };
  const auto y_of = [&](double value) { return kTop + kDown * (high - value) / (high - low); };
  for (const double tick : RoundTicks(low, high, 6)) {
    drawing.lines.push_back({kLeft, y_of(tick), kLeft + kAcross, y_of(tick), 1, kGrid});
    text(kLeft - 8, y_of(tick) + 4, Anchor::kEnd, NumberText(tick));
  }
  for (const double tick : RoundTicks(double(range.first), double(range.last), 8)) {
    if (tick == std::floor(tick)) text(x_of(tick), kTop + kDown + 20, Anchor::kMiddle, Format("%.0f", tick));
  }
  text(kLeft + kAcross / 2.0, Drawing::kHeight - 8, Anchor::kMiddle, "step");
  bool down = false;   // the pen
  const auto point = [&](double step, double value) {
    if (!down) drawing.curves.emplace_back();
    drawing.curves.back().push_back({x_of(step), y_of(value)});
    down = true;
  };
  const auto gap = [&](double step) {   // where the value was not finite
    down = false;
    drawing.lines.push_back({x_of(step), kTop + kDown - 6, x_of(step), kTop + kDown, 2, kGap});
  };
  if (plot.points.size() <= size_t(2 * kAcross)) {
    for (const PlotPoint& p : plot.points) {
      if (std::isfinite(p.value)) point(double(p.step), p.value);
      else gap(double(p.step));
    }
    return drawing;
  }
  const std::vector<Span> spans = Spans(plot.points, range, kAcross);
  for (int x = 0; x < kAcross; ++x) {
    const Span& span = spans[size_t(x)];
    const double step = double(range.first) + double(range.last - range.first) * x / (kAcross - 1);
    if (!span.empty()) {
      point(step, span.low);
      if (span.high > span.low) point(step, span.high);
    }
    if (span.gap) gap(std::floor(step));
  }
  return drawing;
}

}  // namespace hierad
