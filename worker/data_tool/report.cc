#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/text.h"
#include "worker/data_tool/data_tool.h"

namespace hierad {
namespace {

std::string Cell(const Report& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return absl::StrFormat("%.5g", value.get<double>());
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_array()) {
    std::string text;
    for (const Report& item : value) absl::StrAppend(&text, text.empty() ? "" : ", ", Cell(item));
    return text;
  }
  return value.is_null() ? "-" : value.dump();
}

std::string Table(const Report& rows) {
  std::vector<std::string> names;
  for (const auto& [key, value] : rows[0].items()) names.push_back(key);
  std::vector<std::vector<std::string>> cells = {names};
  for (const Report& row : rows) {
    cells.emplace_back();
    for (const std::string& name : names) cells.back().push_back(row.contains(name) ? Cell(row[name]) : "-");
  }
  std::vector<size_t> widths(names.size(), 0);
  for (const auto& row : cells)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const auto& row : cells) {
    text += "  ";
    for (size_t i = 0; i < row.size(); ++i) text += row[i] + (i + 1 < row.size() ? std::string(widths[i] - row[i].size() + 2, ' ') : "");
    text += "\n";
  }
  return text;
}

}  // namespace

std::string ReportText(const Report& report) {
  std::string text;
  for (const auto& [key, value] : report.items()) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', ' ');
    if (key == "job_yaml") {
      absl::StrAppend(&text, "\nFor job.yaml:\n", value.get<std::string>());
    } else if (value.is_array() && !value.empty() && value[0].is_object()) {
      absl::StrAppend(&text, name, "\n", Table(value));
    } else if (key == "findings") {
      absl::StrAppend(&text, value.empty() ? "findings: none\n" : "findings\n");
      for (const Report& finding : value) absl::StrAppend(&text, "  - ", finding.get<std::string>(), "\n");
    } else if (!value.is_array() || !value.empty()) {
      absl::StrAppend(&text, name, ": ", Cell(value), "\n");
    }
  }
  return text;
}

}  // namespace hierad
