// A curve over steps: as characters for a terminal, and as an SVG or PNG file. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hierad {

struct PlotPoint {
  int64_t step;
  double value;   // not finite: a gap, marked below the curve
};

struct Plot {
  std::string title;   // "job 7 (eeg): loss"
  std::vector<PlotPoint> points;   // rising steps
};

// At most `columns` wide, `rows` lines of curve with a scale left and below. `unicode`: eight dots a character, else '*'.
std::string PlotText(const Plot& plot, int columns, int rows, bool unicode);

// A whole SVG document, 960 x 480; of very many points, each pixel column's least and largest are drawn.
std::string PlotSvg(const Plot& plot);
// The same as a PNG file.
std::string PlotPng(const Plot& plot);

// About `count` round numbers that span low..high, for a scale.
std::vector<double> RoundTicks(double low, double high, int count);

}  // namespace hierad
