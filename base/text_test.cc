#include "base/text.h"

#include <gtest/gtest.h>

namespace hierad {
namespace {

TEST(Text, PrintableLeavesPlainAndAccentedText) {
  EXPECT_EQ(Printable("loss 0.5 été 漢字"), "loss 0.5 été 漢字");
}

TEST(Text, PrintableEscapesWhatATerminalWouldObey) {
  EXPECT_EQ(Printable("a\x1b[2Jb"), "a\\x1b[2Jb");
  EXPECT_EQ(Printable("a\nb\r\t"), "a\\x0ab\\x0d\\x09");
  EXPECT_EQ(Printable(std::string_view("\0x", 2)), "\\x00x");
  EXPECT_EQ(Printable("\x7f"), "\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"), "\\xc2\\x9b");                       // C1: a terminal's own escape introducer
  EXPECT_EQ(Printable("\xe2\x80\xae" "abc"), "\\xe2\\x80\\xae" "abc");  // right-to-left override
  EXPECT_EQ(Printable("say \"x\\\""), "say \\\"x\\\\\\\"");
  EXPECT_EQ(PrintableSentence("say \"x\\\"\n"), "say \"x\\\"\\x0a");
}

TEST(Text, PrintableEscapesBytesThatAreNotUtf8) {
  EXPECT_EQ(Printable("Posi\xe7\xe3o"), "Posi\\xe7\\xe3o");
  EXPECT_EQ(Printable("\xc0\xaf"), "\\xc0\\xaf");             // overlong
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");    // surrogate
  EXPECT_EQ(Printable("\xf5\x80\x80\x80"), "\\xf5\\x80\\x80\\x80");
  EXPECT_EQ(Printable("\xe6\xbc"), "\\xe6\\xbc");             // cut short
}

TEST(Text, PrintableCutsBetweenCharacters) {
  EXPECT_EQ(Printable("abcdef", 3), "abc...");
  EXPECT_EQ(Printable("abc", 3), "abc");
  EXPECT_EQ(Printable("aéé", 4), "aé...");
  EXPECT_EQ(Printable("a\x01", 3), "a...");
}

TEST(Text, IsUtf8) {
  EXPECT_TRUE(IsUtf8("été 漢字 🧠"));
  EXPECT_FALSE(IsUtf8("\xff"));
  EXPECT_FALSE(IsUtf8("abc\xc3"));
}

TEST(Text, EditDistance) {
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("weight_dcay", "weight_decay"), 1);
  EXPECT_EQ(EditDistance("ephocs", "epochs"), 2);
  EXPECT_EQ(EditDistance("epcohs", "epochs"), 1);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
}

TEST(Text, SplitKeepsEmptyParts) {
  EXPECT_EQ(Split("a::b:", ':'), (std::vector<std::string>{"a", "", "b", ""}));
  EXPECT_EQ(Split("", ':'), (std::vector<std::string>{""}));
}

}  // namespace
}  // namespace hierad
