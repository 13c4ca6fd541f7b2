#include "worker/data/ts_file.h"

#include <cmath>

#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kHead[] = "# made for the test\n@problemName x\n@timeStamps false\n@classLabel true a b\n@data\n";

absl::StatusOr<TsFile> Parse(const std::string& data, const std::string& head = kHead) { return ParseTs(head + data, "x.ts"); }

std::string Refusal(const std::string& data, const std::string& head = kHead) {
  const auto file = Parse(data, head);
  EXPECT_FALSE(file.ok()) << data;
  if (file.ok()) return "";
  EXPECT_EQ(ReasonOf(file.status()), v1::REASON_DATA_ERROR);
  return std::string(file.status().message());
}

TEST(TsFile, ReadsChannelsValuesAndLabels) {
  const auto file = Parse("1,2.5,-3e-1:4,+5,6:b\r\n\n# between\n7,8,9: 1e-50 ,11,12:a");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->count, 2);
  EXPECT_EQ(file->channels, 2);
  EXPECT_EQ(file->length, 3);
  EXPECT_THAT(file->class_names, ElementsAre("a", "b"));
  EXPECT_THAT(file->labels, ElementsAre(1, 0));
  EXPECT_THAT(file->lines, ElementsAre(6, 9));
  EXPECT_THAT(file->values, ElementsAre(1, 2.5f, -0.3f, 4, 5, 6, 7, 8, 9, 0, 11, 12));
}

TEST(TsFile, ReadsWithoutLabelsAndUnivariate) {
  const auto file = Parse("1,2\n3,4\n", "\xEF\xBB\xBF@univariate true\n@classLabel false\n@data\n");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->channels, 1);
  EXPECT_TRUE(file->labels.empty());
  EXPECT_THAT(file->values, ElementsAre(1, 2, 3, 4));
}

TEST(TsFile, RefusesUnequalShapesWithLineNumbers) {
  EXPECT_THAT(Refusal("1,2:3,4:a\n1,2:3:a\n"), testing::AllOf(HasSubstr("x.ts:7: channel 2 has 1 values"), HasSubstr("line 6) has 2")));
  EXPECT_THAT(Refusal("1,2:3,4,5:a\n"), HasSubstr("x.ts:6: channel 2 has 3 values"));
  EXPECT_THAT(Refusal("1,2:3,4:a\n1,2:a\n"), HasSubstr("x.ts:7: 1 channels, but the sample at line 6 has 2"));
  EXPECT_THAT(Refusal("1:2:a\n", "@dimensions 3\n@classLabel true a\n@data\n"), HasSubstr("@dimensions 3"));
  EXPECT_THAT(Refusal("1,2:a\n", "@seriesLength 3\n@classLabel true a\n@data\n"), HasSubstr("@seriesLength 3"));
}

TEST(TsFile, RefusesMissingAndForeignValuesWithLineAndColumn) {
  EXPECT_THAT(Refusal("1,2:3,?:a\n"), HasSubstr("x.ts:6: column 7 (channel 2): missing value '?'"));
  EXPECT_THAT(Refusal("1,NaN:3,4:a\n"), HasSubstr("column 3 (channel 1): missing value 'NaN'"));
  EXPECT_THAT(Refusal("1,:3,4:a\n"), HasSubstr("column 3 (channel 1): missing value ''"));
  EXPECT_THAT(Refusal("1,1e39:a\n"), HasSubstr("'1e39' is not a finite fp32 number"));
  EXPECT_THAT(Refusal("1,2e999:a\n"), HasSubstr("'2e999' is not a finite fp32 number"));
  EXPECT_THAT(Refusal("1,2x:a\n"), HasSubstr("'2x' is not a number"));
  EXPECT_THAT(Refusal("1,2:c\n"), HasSubstr("class label 'c' is none of @classLabel's: a, b"));
}

TEST(TsFile, MissingValuesAndUnequalLengthsOnRequest) {
  const std::string text = "@classLabel true a b\n@data\n1,?,3:4:a\nNaN,6:7,8,9,10:b\n";
  TsOptions options;
  options.missing = true;
  EXPECT_FALSE(ParseTs(text, "x.ts", options).ok());
  options.unequal = TsOptions::Unequal::kZero;
  const auto zero = ParseTs(text, "x.ts", options);
  ASSERT_TRUE(zero.ok()) << zero.status();
  EXPECT_EQ(zero->length, 4);
  const float nan = NAN;
  EXPECT_THAT(zero->values, testing::Pointwise(testing::NanSensitiveFloatEq(), std::vector<float>{1, nan, 3, 0, 4, 0, 0, 0, nan, 6, 0, 0, 7, 8, 9, 10}));
  options.unequal = TsOptions::Unequal::kEdge;
  const auto edge = ParseTs(text, "x.ts", options);
  ASSERT_TRUE(edge.ok()) << edge.status();
  EXPECT_THAT(edge->values, testing::Pointwise(testing::NanSensitiveFloatEq(), std::vector<float>{1, nan, 3, 3, 4, 4, 4, 4, nan, 6, 6, 6, 7, 8, 9, 10}));
  EXPECT_FALSE(ParseTs("@classLabel false\n@data\n1,,3\n", "x.ts", options).ok());
}

TEST(TsFile, EveryCutOfTheLastLineIsRefusedOrWhole) {
  const std::string first = "1.25,2.5:3.75,4:a\n", last = "5.25,6.5:7.75,8:b";
  for (size_t size = 1; size < last.size(); ++size) {
    const std::string message = Refusal(first + last.substr(0, size));
    EXPECT_THAT(message, HasSubstr("x.ts:7: ")) << last.substr(0, size);
    EXPECT_THAT(message, HasSubstr("may be cut short")) << last.substr(0, size);
  }
  EXPECT_TRUE(Parse(first + last).ok());
}

TEST(TsFile, RefusesWhatItDoesNotRead) {
  EXPECT_THAT(Refusal("", "@timestamps true\n@data\n"), HasSubstr("time stamps are not read"));
  EXPECT_THAT(Refusal("", "@targetLabel true\n@data\n"), HasSubstr("regression targets"));
  EXPECT_THAT(Refusal("", "1,2:a\n"), HasSubstr("x.ts:1: '1,2:a' stands before @data"));
  EXPECT_THAT(Refusal("", "@problemName x\n"), HasSubstr("no @data line"));
  EXPECT_THAT(Refusal("\n"), HasSubstr("0 samples"));
}

}  // namespace
}  // namespace hierad
