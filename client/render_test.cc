#include "client/render.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <ctime>

namespace hierad {
namespace {

TEST(Render, Durations) {
  EXPECT_EQ(DurationText(0), "0.0 s");
  EXPECT_EQ(DurationText(4.24), "4.2 s");
  EXPECT_EQ(DurationText(9.96), "10 s");
  EXPECT_EQ(DurationText(59.6), "1 min 00 s");
  EXPECT_EQ(DurationText(192), "3 min 12 s");
  EXPECT_EQ(DurationText(18120), "5 h 02 min");
  EXPECT_EQ(DurationText(3 * 86400 + 4 * 3600), "3 d 04 h");
  EXPECT_EQ(DurationText(-1), "?");
  EXPECT_EQ(DurationText(NAN), "?");
  EXPECT_EQ(DurationText(INFINITY), "?");
  EXPECT_NE(DurationText(1e300), "");
}

TEST(Render, BytesAndCounts) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1024), "1.0 KiB");
  EXPECT_EQ(BytesText((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(BytesText(9'542'041'600), "8.9 GiB");
  EXPECT_EQ(CountText(0.25), "0.2");
  EXPECT_EQ(CountText(64), "64");
  EXPECT_EQ(CountText(123.4), "123");
  EXPECT_EQ(CountText(4096), "4,096");
  EXPECT_EQ(CountText(540'123), "540,123");
  EXPECT_EQ(CountText(70.1e6), "70.1 M");
  EXPECT_EQ(CountText(NAN), "NaN");
}

TEST(Render, NumbersThatAreNone) {
  EXPECT_EQ(NumberText(0.14321), "0.1432");
  EXPECT_EQ(NumberText(8e-4), "0.0008");
  EXPECT_EQ(NumberText(NAN), "NaN");
  EXPECT_EQ(NumberText(-INFINITY), "-Infinity");
}

TEST(Render, LocalTimes) {
  ::setenv("TZ", "UTC", 1);
  ::tzset();
  EXPECT_EQ(LocalTime(1'700'000'000'000), "2023-11-14 22:13:20");
  EXPECT_EQ(LocalTime(0), "-");
}

TEST(Render, ColumnsCountCharactersAndNoColour) {
  EXPECT_EQ(Columns("été"), 3u);
  EXPECT_EQ(Columns(Painted("été", Color::kRed, true)), 3u);
  EXPECT_EQ(Painted("x", Color::kRed, false), "x");
  EXPECT_EQ(Cut("abcdef", 6), "abcdef");
  EXPECT_EQ(Cut("abcdef", 4), "abc.");
  EXPECT_EQ(Cut("ééééé", 3), "éé.");
  EXPECT_EQ(Columns(Cut(Painted("abcdef", Color::kRed, true), 4)), 4u);
  EXPECT_NE(Cut(Painted("abcdef", Color::kRed, true), 4).find("\x1b[0m"), std::string::npos) << "colour ends with the line";
}

TEST(Render, Bars) {
  EXPECT_EQ(Bar(0.5, 4, false), "##--");
  EXPECT_EQ(Bar(1.0, 4, false), "####");
  EXPECT_EQ(Bar(7, 4, false), "####");
  EXPECT_EQ(Bar(NAN, 4, false), "----");
  EXPECT_EQ(Bar(0.3, 10, true), "███░░░░░░░");
}

TEST(Render, SparklineFollowsTheValues) {
  EXPECT_EQ(Sparkline({}, 10, true), "");
  EXPECT_EQ(Sparkline({0, 1, 2, 3, 4, 5, 6, 7}, 10, true), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(Sparkline({5, 5, 5}, 10, true), "▄▄▄");
  EXPECT_EQ(Sparkline({8, 8, 0, 0}, 2, false), "#_") << "averaged down to two places";
}

TEST(Render, SparklineShowsNaN) {
  EXPECT_EQ(Sparkline({1, NAN, 2, INFINITY}, 10, false), "_x#x");
  EXPECT_EQ(Sparkline({NAN}, 10, true), "×");
  EXPECT_EQ(Columns(Sparkline(std::vector<double>(1000, NAN), 30, true)), 30u);
}

TEST(Render, TablesAlign) {
  Table table({"ID", "NAME", "STATE"});
  table.AlignRight({0});
  table.Add({"7", "é", Painted("RUNNING", Color::kCyan, true)});
  table.Add({"123", "long-name", ""});
  EXPECT_EQ(table.Text(), " ID  NAME       STATE\n  7  é          " + Painted("RUNNING", Color::kCyan, true) + "\n123  long-name\n");
}

}  // namespace
}  // namespace hierad
