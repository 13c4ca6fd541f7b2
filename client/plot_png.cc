// A curve as PNG: drawn three times as large and averaged, so that lines are smooth; letters as small bitmaps.
#include <png.h>

#include <algorithm>
#include <cmath>

#include "client/plot.h"
#include "client/plot_drawing.h"
#include "client/plot_letters.h"

namespace hierad {
namespace {

constexpr int kFine = 3;   // fine pixels a pixel, on each axis
constexpr uint32_t kPaper = 0xFFFFFF;

class Canvas {
 public:
  Canvas() : fine_(size_t(kFine * Drawing::kWidth) * (kFine * Drawing::kHeight), kPaper) {}

  void Line(double x0, double y0, double x1, double y1, double width, uint32_t color) {
    const double length = std::hypot(x1 - x0, y1 - y0);
    const int steps = std::max(1, int(std::ceil(length * kFine)));
    for (int i = 0; i <= steps; ++i) Dot(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps, width / 2, color);
  }

  // Averages; letters come on top, as they are.
  std::vector<uint8_t> Rgb(const std::vector<Drawing::Text>& texts) const {
    std::vector<uint8_t> rgb(size_t(Drawing::kWidth) * Drawing::kHeight * 3);
    for (int y = 0; y < Drawing::kHeight; ++y) {
      for (int x = 0; x < Drawing::kWidth; ++x) {
        for (int c = 0; c < 3; ++c) {
          unsigned sum = 0;
          for (int i = 0; i < kFine * kFine; ++i) sum += fine_[size_t(y * kFine + i / kFine) * (Drawing::kWidth * kFine) + x * kFine + i % kFine] >> (16 - 8 * c) & 0xFF;
          rgb[(size_t(y) * Drawing::kWidth + x) * 3 + c] = uint8_t((sum + kFine * kFine / 2) / (kFine * kFine));
        }
      }
    }
    for (const Drawing::Text& text : texts) Write(text, &rgb);
    return rgb;
  }

 private:
  void Dot(double x, double y, double radius, uint32_t color) {
    const double cx = x * kFine, cy = y * kFine, r = std::max(0.5, radius * kFine);
    for (int py = int(std::floor(cy - r)); py <= int(std::ceil(cy + r)); ++py) {
      for (int px = int(std::floor(cx - r)); px <= int(std::ceil(cx + r)); ++px) {
        const bool inside = std::hypot(px + 0.5 - cx, py + 0.5 - cy) <= r + 0.25;
        if (inside && px >= 0 && py >= 0 && px < kFine * Drawing::kWidth && py < kFine * Drawing::kHeight) fine_[size_t(py) * (kFine * Drawing::kWidth) + px] = color;
      }
    }
  }

  static void Write(const Drawing::Text& text, std::vector<uint8_t>* rgb) {
    constexpr int kZoom = 2;
    const int advance = (kLetterColumns + 1) * kZoom, wide = advance * int(text.words.size()) - kZoom;
    int left = int(std::lround(text.x)) - (text.anchor == Anchor::kStart ? 0 : text.anchor == Anchor::kMiddle ? wide / 2 : wide);
    const int top = int(std::lround(text.y)) - kLetterBase * kZoom;
    for (const char letter : text.words) {
      const Letter& shape = LetterOf(letter);
      for (int y = 0; y < kLetterRows * kZoom; ++y) {
        for (int x = 0; x < kLetterColumns * kZoom; ++x) {
          const int px = left + x, py = top + y;
          if ((shape[y / kZoom] >> (kLetterColumns - 1 - x / kZoom) & 1) == 0 || px < 0 || py < 0 || px >= Drawing::kWidth || py >= Drawing::kHeight) continue;
          for (int c = 0; c < 3; ++c) (*rgb)[(size_t(py) * Drawing::kWidth + px) * 3 + c] = uint8_t(Drawing::kInk >> (16 - 8 * c));
        }
      }
      left += advance;
    }
  }

  std::vector<uint32_t> fine_;   // 0xRRGGBB
};

}  // namespace

std::string PlotPng(const Plot& plot) {
  const Drawing drawing = DrawPlot(plot);
  Canvas canvas;
  for (const Drawing::Line& l : drawing.lines) canvas.Line(l.x0, l.y0, l.x1, l.y1, l.width, l.color);
  for (const auto& curve : drawing.curves) {
    canvas.Line(curve[0].x, curve[0].y, curve[0].x, curve[0].y, Drawing::kCurveWidth, Drawing::kCurve);   // a lone point
    for (size_t i = 1; i < curve.size(); ++i) canvas.Line(curve[i - 1].x, curve[i - 1].y, curve[i].x, curve[i].y, Drawing::kCurveWidth, Drawing::kCurve);
  }
  const std::vector<uint8_t> rgb = canvas.Rgb(drawing.texts);
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = Drawing::kWidth;
  image.height = Drawing::kHeight;
  image.format = PNG_FORMAT_RGB;
  std::string out(PNG_IMAGE_PNG_SIZE_MAX(image), '\0');
  png_alloc_size_t bytes = out.size();
  if (png_image_write_to_memory(&image, out.data(), &bytes, 0, rgb.data(), 0, nullptr) == 0) return "";   // memory alone can fail here
  out.resize(bytes);
  return out;
}

}  // namespace hierad
