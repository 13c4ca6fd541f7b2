// What a curve's picture is made of, in pixels from the top left: the same for every kind of file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/plot.h"

namespace hierad {

enum class Anchor { kStart, kMiddle, kEnd };   // where in the text (x, y) lies; y: of its base line

struct Drawing {
  static constexpr int kWidth = 960, kHeight = 480;
  static constexpr uint32_t kInk = 0x333333, kCurve = 0x1F6FB4;   // 0xRRGGBB
  static constexpr double kCurveWidth = 1.5;

  struct Text {
    double x, y;
    Anchor anchor;
    std::string words;
    bool large;
  };
  struct Line {
    double x0, y0, x1, y1, width;
    uint32_t color;
  };
  struct Point {
    double x, y;
  };
  std::vector<Text> texts;
  std::vector<Line> lines;
  std::vector<std::vector<Point>> curves;   // pieces between gaps
};

Drawing DrawPlot(const Plot& plot);

}  // namespace hierad
