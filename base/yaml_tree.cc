#include "base/yaml_tree.h"

#include <yaml-cpp/anchor.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

struct TooDeep {
  int line;
};

// Builds the tree from the parser's events: YAML::Node would hide aliases and doubled keys.
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(int max_depth) : max_depth_(max_depth) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { Put(Make(YamlNode::kNull, mark, "", anchor)); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    YamlNode node;
    node.line = mark.line + 1;
    Refuse(&node, "aliases (*name) are not supported; write the value out");
    Put(std::move(node));
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    YamlNode node = Make(YamlNode::kScalar, mark, tag, anchor);
    if (node.kind == YamlNode::kScalar) {
      node.text = value;
      node.quoted = tag == "!";
    }
    Put(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(Make(YamlNode::kList, mark, tag, anchor));
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(Make(YamlNode::kMap, mark, tag, anchor));
  }
  void OnMapEnd() override { Close(); }
  void OnAnchor(const YAML::Mark&, const std::string&) override {}

  YamlNode TakeRoot() { return std::move(root_); }

 private:
  // A node being filled; its children keep coming even if it is refused.
  struct Frame {
    YamlNode node;
    std::optional<YamlNode> key;
    bool is_map;
  };

  static void Refuse(YamlNode* node, const char* why) {
    node->kind = YamlNode::kRefused;
    node->text = why;
  }

  static YamlNode Make(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    YamlNode node;
    node.kind = kind;
    node.line = mark.line + 1;
    if (anchor != 0) Refuse(&node, "anchors (&name) are not supported; write the value out where it is needed");
    else if (tag != "" && tag != "?" && tag != "!") Refuse(&node, "tags (!name) are not supported; write the plain value");
    return node;
  }

  void Open(YamlNode node) {
    if (int(stack_.size()) >= max_depth_) throw TooDeep{node.line};
    const bool is_map = node.kind == YamlNode::kMap;
    stack_.push_back({std::move(node), std::nullopt, is_map});
  }

  void Close() {
    YamlNode node = std::move(stack_.back().node);
    stack_.pop_back();
    if (node.kind == YamlNode::kRefused) {
      node.items.clear();
      node.entries.clear();
    }
    Put(std::move(node));
  }

  void Put(YamlNode node) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& frame = stack_.back();
    // A refused map cannot be told from a refused list any more; either way its children are dropped at Close.
    if (!frame.is_map) {
      frame.node.items.push_back(std::move(node));
    } else if (!frame.key) {
      frame.key = std::move(node);
    } else {
      frame.node.entries.push_back({*std::move(frame.key), std::move(node)});
      frame.key.reset();
    }
  }

  const int max_depth_;
  std::vector<Frame> stack_;
  YamlNode root_;
};

absl::Status At(const std::string& file_name, int line, const std::string& problem) {
  return ErrorOf(v1::REASON_USER_ERROR, file_name + ":" + std::to_string(std::max(line, 1)) + ": " + problem);
}

// yaml-cpp takes a byte 0x04 for the end of the file and passes bytes that are not UTF-8 on.
absl::Status CheckBytes(std::string_view text, const std::string& file_name) {
  int line = 1;
  while (!text.empty()) {
    const Rune rune = FirstRune(text);
    if (rune.code == '\n') ++line;
    if (rune.code == 0xFFFFFFFF) {
      return At(file_name, line, "byte " + Printable(text.substr(0, 1)) + " is not UTF-8; save the file as UTF-8");
    }
    if ((rune.code < 0x20 && rune.code != '\n' && rune.code != '\r' && rune.code != '\t') || rune.code == 0x7F) {
      return At(file_name, line, "control character " + Printable(text.substr(0, 1)) + "; remove it");
    }
    text.remove_prefix(rune.bytes);
  }
  return absl::OkStatus();
}

// What the parser's words mean to whoever typed the line.
std::string Advice(std::string_view text, int line, std::string_view problem) {
  for (; line > 0 && !text.empty(); --line) text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  const std::string_view indent = text.substr(0, text.find_first_not_of(" \t"));
  if (indent.find('\t') != indent.npos) return "; the line is indented with a tab, which YAML forbids: use spaces";
  if (problem == "illegal map value") {
    return "; a second ':' in a line, or a line that is not indented like its neighbours: put a text with ': ' in it in quotes";
  }
  return "";
}

}  // namespace

absl::StatusOr<YamlNode> ParseYamlTree(std::string_view text, const std::string& file_name, int64_t max_bytes,
                                       int max_depth) {
  if (int64_t(text.size()) > max_bytes) {
    return At(file_name, 1, "the file has " + std::to_string(text.size()) + " bytes; at most " +
                                std::to_string(max_bytes) + " are read");
  }
  RETURN_IF_ERROR(CheckBytes(text, file_name));
  std::istringstream stream{std::string(text)};
  TreeBuilder builder(max_depth);
  try {
    YAML::Parser parser(stream);
    parser.HandleNextDocument(builder);
    TreeBuilder second(max_depth);
    if (parser.HandleNextDocument(second)) {
      return At(file_name, second.TakeRoot().line, "a second YAML document begins here (---); one file holds one");
    }
  } catch (const TooDeep& deep) {
    return At(file_name, deep.line, "nested deeper than " + std::to_string(max_depth) + " levels");
  } catch (const YAML::Exception& e) {
    return At(file_name, e.mark.line + 1, "not valid YAML: " + PrintableSentence(e.msg) + ", column " +
                                              std::to_string(e.mark.column + 1) +
                                              Advice(text, e.mark.line, e.msg));
  } catch (const std::exception& e) {
    return At(file_name, 1, "not valid YAML: " + PrintableSentence(e.what()));
  }
  return builder.TakeRoot();
}

std::string YamlQuoted(std::string_view text) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '/'; };
  const bool plain = !text.empty() && letter(text[0]) && std::all_of(text.begin(), text.end(), [&](char c) {
    return letter(c) || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '+';
  });
  std::string lower(text);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? char(c + 32) : c;
  static constexpr std::string_view kTaken[] = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"};
  if (plain && std::find(std::begin(kTaken), std::end(kTaken), lower) == std::end(kTaken)) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) {
    static constexpr char kHex[] = "0123456789ABCDEF";
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (uint8_t(c) < 0x20 || c == 0x7F) {
      quoted += "\\x";
      quoted += kHex[uint8_t(c) >> 4];
      quoted += kHex[uint8_t(c) & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace hierad
