#include "client/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>

#include <png.h>

#include "base/text.h"
#include "client/plot_drawing.h"
#include "client/plot_letters.h"
#include "client/render.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Plot Falling(int64_t steps) {
  Plot plot{"job 7: loss", {}};
  for (int64_t s = 1; s <= steps; ++s) plot.points.push_back({s, 1.0 / double(s)});
  return plot;
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines = Split(text, '\n');
  lines.pop_back();
  return lines;
}

TEST(PlotText, AFallingCurveGoesFromTopLeftToBottomRight) {
  const auto lines = Lines(PlotText(Falling(100), 80, 16, false));
  ASSERT_EQ(lines.size(), 18u);   // title, curve, steps
  EXPECT_EQ(lines[0], "job 7: loss");
  EXPECT_THAT(lines[1], HasSubstr(" 1 |*"));
  EXPECT_EQ(lines[16].back(), '*');
  EXPECT_EQ(lines[16].size(), 80u);
  EXPECT_THAT(lines[17], testing::AllOf(HasSubstr(" 1 "), testing::EndsWith("100")));
  for (const auto& line : lines) EXPECT_LE(line.size(), 80u);
}

TEST(PlotText, FitsAnyTerminalAndIsUtf8) {
  for (const int columns : {20, 40, 80, 200}) {
    for (const bool unicode : {false, true}) {
      for (const int64_t steps : {1, 2, 1000, 50000}) {
        const std::string text = PlotText(Falling(steps), columns, 8, unicode);
        EXPECT_TRUE(IsUtf8(text));
        for (const auto& line : Lines(text)) EXPECT_LE(Columns(line), size_t(std::max(columns, 23))) << line;
      }
    }
  }
}

TEST(PlotText, ValuesThatAreNotFiniteAreMarked) {
  Plot plot = Falling(60);
  plot.points[30].value = NAN;
  plot.points[40].value = INFINITY;
  EXPECT_THAT(PlotText(plot, 80, 8, false), HasSubstr("NaN |"));
  for (auto& p : plot.points) p.value = NAN;
  EXPECT_THAT(PlotText(plot, 80, 8, false), HasSubstr("no finite values"));
  EXPECT_THAT(PlotText({"empty", {}}, 80, 8, false), HasSubstr("no finite values"));
}

TEST(PlotText, AFlatCurveRunsThroughTheMiddle) {
  Plot plot{"flat", {{1, 2.0}, {2, 2.0}, {50, 2.0}}};
  const auto lines = Lines(PlotText(plot, 80, 9, false));
  EXPECT_THAT(lines[5], HasSubstr("*"));
  EXPECT_THAT(lines[1], Not(HasSubstr("*")));
}

TEST(PlotSvg, IsADocumentOfBoundedSizeWithoutForeignMarkup) {
  Plot plot = Falling(200000);
  plot.title = "a <script>\"&";
  plot.points[100].value = NAN;
  const std::string svg = PlotSvg(plot);
  EXPECT_LT(svg.size(), 100'000u);
  EXPECT_THAT(svg, HasSubstr("a &lt;script&gt;&quot;&amp;"));
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("#c0392b"));   // the gap's mark
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

struct Pixels {
  unsigned width = 0, height = 0;
  std::vector<uint8_t> rgb;
  uint32_t At(int x, int y) const {
    const uint8_t* p = &rgb[(size_t(y) * width + size_t(x)) * 3];
    return uint32_t{p[0]} << 16 | uint32_t{p[1]} << 8 | p[2];
  }
};

Pixels Decoded(const std::string& png) {
  Pixels pixels;
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  EXPECT_NE(png_image_begin_read_from_memory(&image, png.data(), png.size()), 0);
  image.format = PNG_FORMAT_RGB;
  pixels.width = image.width, pixels.height = image.height;
  pixels.rgb.resize(PNG_IMAGE_SIZE(image));
  EXPECT_NE(png_image_finish_read(&image, nullptr, pixels.rgb.data(), 0, nullptr), 0);
  return pixels;
}

// The curve runs in the picture where the drawing says: the same places as in the SVG.
TEST(PlotPng, ShowsTheCurveOfTheSvg) {
  Plot plot = Falling(60);
  plot.points[30].value = NAN;
  const Drawing drawing = DrawPlot(plot);
  ASSERT_EQ(drawing.curves.size(), 2u);
  const Pixels pixels = Decoded(PlotPng(plot));
  ASSERT_EQ(pixels.width, 960u);
  ASSERT_EQ(pixels.height, 480u);
  const std::string svg = PlotSvg(plot);
  for (const auto& curve : drawing.curves) {
    for (const auto& p : curve) {
      const uint32_t color = pixels.At(int(p.x), int(p.y));
      EXPECT_LT(color >> 16, 0x80u) << p.x << " " << p.y;   // blue, not paper
      char place[40];
      std::snprintf(place, sizeof place, "%.1f %.1f", p.x, p.y);
      EXPECT_THAT(svg, HasSubstr(place));
    }
  }
  EXPECT_EQ(pixels.At(900, 60), 0xFFFFFFu);   // nothing there
  int ink = 0;
  for (int y = 8; y < 30; ++y)
    for (int x = 80; x < 300; ++x) ink += pixels.At(x, y) == Drawing::kInk;
  EXPECT_GT(ink, 200);   // the title
  for (const Plot& odd : {Plot{"empty", {}}, Plot{"one", {{5, 1.0}}}, Plot{"nan", {{1, NAN}, {2, INFINITY}}}, Falling(200000)}) {
    EXPECT_EQ(Decoded(PlotPng(odd)).width, 960u) << odd.title;
  }
}

TEST(PlotPng, HasTheLettersOfNumbersAndColumns) {
  const std::string needed = NumberText(-1.5e-7) + NumberText(12345.678) + " :abcdefghijklmnopqrstuvwxyz_0123456789";
  for (const char letter : needed) EXPECT_NE(LetterOf(letter), LetterOf('~')) << letter;
}

TEST(RoundTicks, AreRoundAndInside) {
  EXPECT_THAT(RoundTicks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(RoundTicks(0.13, 0.29, 4), ElementsAre(testing::DoubleNear(0.15, 1e-9), testing::DoubleNear(0.2, 1e-9), testing::DoubleNear(0.25, 1e-9)));
  EXPECT_THAT(RoundTicks(3, 3, 4), ElementsAre(3));
}

}  // namespace
}  // namespace hierad
