#include "base/yaml_tree.h"

#include <gtest/gtest.h>

namespace hierad {
namespace {

absl::StatusOr<YamlNode> Parse(const std::string& text) { return ParseYamlTree(text, "f.yaml", 4096, 4); }

std::string ErrorIn(const std::string& text) {
  const auto tree = Parse(text);
  return tree.ok() ? "" : std::string(tree.status().message());
}

TEST(YamlTree, KeepsLinesOrderAndDoubledKeys) {
  const auto root = Parse("# c\na: 1\nb:\n  - x\n  - 'y'\na: 2\n");
  ASSERT_TRUE(root.ok()) << root.status();
  ASSERT_EQ(root->entries.size(), 3u);
  EXPECT_EQ(root->entries[0].key.text, "a");
  EXPECT_EQ(root->entries[0].key.line, 2);
  EXPECT_EQ(root->entries[2].key.line, 6);
  const YamlNode& list = root->entries[1].value;
  ASSERT_EQ(list.kind, YamlNode::kList);
  EXPECT_FALSE(list.items[0].quoted);
  EXPECT_TRUE(list.items[1].quoted);
  EXPECT_EQ(list.items[1].line, 5);
}

TEST(YamlTree, MarksAnchorsAliasesAndTags) {
  const auto root = Parse("a: &x {p: [1]}\nb: *x\nc: !!str 5\nd: &y 1\ne: !local [1, 2]\nf: 3\n");
  ASSERT_TRUE(root.ok()) << root.status();
  ASSERT_EQ(root->entries.size(), 6u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(root->entries[i].value.kind, YamlNode::kRefused) << i;
  EXPECT_EQ(root->entries[5].value.text, "3");
  EXPECT_NE(root->entries[1].value.text.find("aliases"), std::string::npos);
}

TEST(YamlTree, Empty) {
  EXPECT_EQ(Parse("")->kind, YamlNode::kNull);
  EXPECT_EQ(Parse("# only a comment\n")->kind, YamlNode::kNull);
  EXPECT_EQ(Parse("~")->kind, YamlNode::kNull);
}

TEST(YamlTree, BrokenYamlIsASentenceWithALine) {
  EXPECT_EQ(ErrorIn("a: 1\nb: [1, 2\n").substr(0, 9), "f.yaml:3:");
  EXPECT_NE(ErrorIn("a: 1\nb: c: d\n").find("f.yaml:2: not valid YAML"), std::string::npos) << ErrorIn("a: 1\nb: c: d\n");
  EXPECT_NE(ErrorIn("a: *none\n").find("f.yaml:1: not valid YAML"), std::string::npos) << ErrorIn("a: *none\n");
  EXPECT_NE(ErrorIn("a: 1\nb: c: d\n").find("a second ':' in a line"), std::string::npos);
  EXPECT_NE(ErrorIn("\ta: 1\n").find("not valid YAML"), std::string::npos);
  EXPECT_NE(ErrorIn("a: 1\nb:\n\tc: 1\nd: 2\n").find("f.yaml:3: not valid YAML"), std::string::npos) << ErrorIn("a: 1\nb:\n\tc: 1\nd: 2\n");
  for (const char* tabs : {"\ta: 1\n", "a:\n\tb: 1\n", "a: 1\nb:\n  \tc: 1\nd: 2\n"}) {
    EXPECT_NE(ErrorIn(tabs).find("indented with a tab, which YAML forbids: use spaces"), std::string::npos) << ErrorIn(tabs);
  }
  EXPECT_NE(ErrorIn("a: \"\\q\"\n").find("not valid YAML"), std::string::npos);
}

TEST(YamlTree, OneDocument) {
  EXPECT_EQ(ErrorIn("a: 1\n---\nb: 2\n").find("f.yaml:3: a second YAML document"), 0u) << ErrorIn("a: 1\n---\nb: 2\n");
  EXPECT_EQ(ErrorIn("---\na: 1\n"), "");
}

TEST(YamlTree, BytesThatAreNoText) {
  EXPECT_EQ(ErrorIn("a: 1\nb: \xff\n"), "f.yaml:2: byte \\xff is not UTF-8; save the file as UTF-8");
  EXPECT_EQ(ErrorIn(std::string("a: 1\0", 5)), "f.yaml:1: control character \\x00; remove it");
  EXPECT_EQ(ErrorIn("a: 1\n\x04\nb: 2\n"), "f.yaml:2: control character \\x04; remove it");
  EXPECT_EQ(ErrorIn("\xef\xbb\xbf" "a: 1\r\n"), "");
}

TEST(YamlTree, SizeAndDepth) {
  EXPECT_EQ(ErrorIn("a: " + std::string(5000, 'x')), "f.yaml:1: the file has 5003 bytes; at most 4096 are read");
  EXPECT_EQ(ErrorIn("[[[[1]]]]"), "");
  EXPECT_EQ(ErrorIn("[[[[\n[1]]]]]"), "f.yaml:2: nested deeper than 4 levels");
  EXPECT_NE(ErrorIn(std::string(4000, '[')).find("nested deeper"), std::string::npos);
  EXPECT_NE(ErrorIn(std::string(4000, '{')), "");
}

TEST(YamlTree, QuotedReadsBack) {
  for (const std::string text : {"plain", "/a b/c", "", "null", "True", "12", "-rf", "a: b", "# x", "été", "say \"x\\\"",
                                 "a\nb", "'", "*x", "&x", "!x", "{", "a #b", " lead", "trail ", "x\x7f", "..", "1e3"}) {
    const auto root = Parse("k: " + YamlQuoted(text) + "\nl: 1\n");
    ASSERT_TRUE(root.ok()) << root.status();
    ASSERT_EQ(root->entries.size(), 2u) << text;
    EXPECT_EQ(root->entries[0].value.kind, YamlNode::kScalar) << text;
    EXPECT_EQ(root->entries[0].value.text, text);
  }
  EXPECT_EQ(YamlQuoted("/data/a-b_c.npy"), "/data/a-b_c.npy");
}

}  // namespace
}  // namespace hierad
