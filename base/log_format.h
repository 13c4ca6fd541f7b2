// The lines that hierad, its agent and its workers log: time (UTC), level, whose it is, and a sentence.
//   2026-11-30T17:17:39.123Z info job=7 attempt=1 rank=0: checkpoint of step 600: 3 MB in 0.02 s
// With HIERAD_LOG_FORMAT=json in the environment (hierad's setting log_format puts it there for all it starts), an object:
//   {"time":"2026-11-30T17:17:39.123Z","level":"info","program":"hiera-worker","job":7,"attempt":1,"rank":0,"message":"..."}
// Header-only: base itself needs no spdlog.
#pragma once

#include <spdlog/details/log_msg.h>
#include <spdlog/formatter.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"

namespace hierad {

inline constexpr char kLogFormatVariable[] = "HIERAD_LOG_FORMAT";

// debug, info, warn or error; any other word, of a newer hierad, changes nothing.
inline void SetLogLevel(const std::string& word) {
  if (word != "debug" && word != "info" && word != "warn" && word != "error") return;
  spdlog::set_level(spdlog::level::from_str(word));
}

class LogLine : public spdlog::formatter {
 public:
  // Numbers that stand in every line, by name.
  using Fields = std::vector<std::pair<std::string, int64_t>>;

  LogLine(std::string program, Fields fields, bool json) : program_(std::move(program)), fields_(std::move(fields)), json_(json) {}
  LogLine(std::string program, Fields fields) : LogLine(std::move(program), std::move(fields), WantsJson()) {}

  static bool WantsJson() {
    const char* format = std::getenv(kLogFormatVariable);
    return format != nullptr && std::string_view(format) == "json";
  }

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const std::string_view text(message.payload.data(), message.payload.size());
    const std::string time = TimeOf(message.time);
    const std::string_view level(spdlog::level::to_string_view(message.level).data(), spdlog::level::to_string_view(message.level).size());
    std::string line;
    if (json_) {
      line = "{\"time\":\"" + time + "\",\"level\":\"" + std::string(level) + "\",\"program\":\"" + program_ + "\"";
      for (const auto& [name, value] : fields_) line += ",\"" + name + "\":" + std::to_string(value);
      if (const std::string job = JobOf(text); !job.empty() && fields_.empty()) line += ",\"job\":" + job;
      line += ",\"message\":\"" + JsonEscaped(text) + "\"}";
    } else {
      line = time + " " + std::string(level);
      for (const auto& [name, value] : fields_) line += " " + name + "=" + std::to_string(value);
      line += ": " + std::string(text);
    }
    line += "\n";
    out.append(line.data(), line.data() + line.size());
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<LogLine>(program_, fields_, json_); }

 private:
  static std::string TimeOf(spdlog::log_clock::time_point at) {
    const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(at.time_since_epoch()).count();
    const std::time_t seconds = std::time_t(ms / 1000);
    std::tm parts{};
    gmtime_r(&seconds, &parts);
    char text[40], whole[48];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
    std::snprintf(whole, sizeof whole, "%s.%03dZ", text, int(ms % 1000));
    return whole;
  }

  // hierad's own lines on a job begin with "job N".
  static std::string JobOf(std::string_view text) {
    if (text.substr(0, 4) != "job ") return "";
    const size_t end = text.find_first_not_of("0123456789", 4);
    return std::string(text.substr(4, end == std::string_view::npos ? end : end - 4));
  }

  static std::string JsonEscaped(std::string_view text) {
    std::string out;
    while (!text.empty()) {
      const Rune rune = FirstRune(text);
      if (rune.code == 0xFFFFFFFF) {
        out += "\\ufffd";
      } else if (rune.code == '"' || rune.code == '\\') {
        out += '\\';
        out += char(rune.code);
      } else if (rune.code < 0x20) {
        char code[8];
        std::snprintf(code, sizeof code, "\\u%04x", rune.code);
        out += code;
      } else {
        out += text.substr(0, rune.bytes);
      }
      text.remove_prefix(rune.bytes);
    }
    return out;
  }

  const std::string program_;
  const Fields fields_;
  const bool json_;
};

}  // namespace hierad
