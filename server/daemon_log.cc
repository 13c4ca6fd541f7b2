#include "server/daemon_log.h"

#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "base/log_format.h"
#include "base/status.h"

namespace hierad {

void SetUpDaemonLog(const ServerConfig& config, const LogFileLimits& limits) {
  setenv(kLogFormatVariable, config.log_format.c_str(), 1);   // also of what hierad starts
  spdlog::sink_ptr sink;
  try {
    if (!config.log_file.empty()) sink = std::make_shared<spdlog::sinks::rotating_file_sink_mt>(config.log_file, limits.bytes, limits.older);
  } catch (const spdlog::spdlog_ex& error) {
    std::fprintf(stderr, "hierad: log_file: %s; logging to stderr\n", error.what());
  }
  if (sink == nullptr) sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  auto logger = std::make_shared<spdlog::logger>("hierad", std::move(sink));
  logger->set_formatter(std::make_unique<LogLine>("hierad", LogLine::Fields{}));
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  SetLogLevel(config.log_level);
}

absl::Status ReloadLogLevel(const std::string& config_file) {
  if (config_file.empty()) return absl::FailedPreconditionError("hierad was started without a file of settings (--config)");
  ServerConfig config;
  RETURN_IF_ERROR(ReadConfig(config_file, &config));
  RETURN_IF_ERROR(CheckLogLevel(config.log_level));
  const auto say = [&] { spdlog::info("log level {}, as {} says", config.log_level, config_file); };
  const bool heard = spdlog::should_log(spdlog::level::info);   // else it may be by the new one
  if (heard) say();
  SetLogLevel(config.log_level);
  if (!heard) say();
  return absl::OkStatus();
}

}  // namespace hierad
