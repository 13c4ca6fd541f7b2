#include "worker/metrics/metrics_file.h"

#include <cerrno>
#include <cmath>
#include <deque>
#include <fcntl.h>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/fs_descriptor.h"
#include "base/status.h"

namespace hierad {
namespace {

using json = nlohmann::ordered_json;

json Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

double NumberOf(const json& value) {
  if (!value.is_string()) return value.get<double>();
  const auto text = value.get<std::string>();
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

std::string MetricsLine(const v1::StepMetrics& m) {
  json line = {{"step", m.step()},
               {"epoch", Number(m.epoch())},
               {"loss", Number(m.loss())},
               {"grad_norm", Number(m.grad_norm())},
               {"lr", Number(m.lr())},
               {"samples", m.samples()},
               {"step_s", Number(m.step_s())},
               {"data_wait_s", Number(m.data_wait_s())},
               {"skipped", m.skipped()},
               {"time_ms", m.time_ms()}};
  if (m.has_forward_s()) {
    line["forward_s"] = Number(m.forward_s());
    line["backward_s"] = Number(m.backward_s());
    line["communication_s"] = Number(m.communication_s());
    line["optimizer_s"] = Number(m.optimizer_s());
  }
  if (m.has_loss_scale()) line["loss_scale"] = Number(m.loss_scale());
  if (m.has_eval_loss()) line["eval_loss"] = Number(m.eval_loss());
  return line.dump();
}

bool ParseMetricsLine(const std::string& text, v1::StepMetrics* m) {
  try {
    const json line = json::parse(text);
    m->Clear();
    m->set_step(line.at("step").get<int64_t>());
    m->set_epoch(NumberOf(line.at("epoch")));
    m->set_loss(NumberOf(line.at("loss")));
    m->set_grad_norm(NumberOf(line.at("grad_norm")));
    m->set_lr(NumberOf(line.at("lr")));
    m->set_samples(line.at("samples").get<int64_t>());
    m->set_step_s(NumberOf(line.at("step_s")));
    m->set_data_wait_s(NumberOf(line.at("data_wait_s")));
    m->set_skipped(line.at("skipped").get<bool>());
    m->set_time_ms(line.at("time_ms").get<int64_t>());
    if (line.contains("forward_s")) {
      m->set_forward_s(NumberOf(line["forward_s"]));
      m->set_backward_s(NumberOf(line.at("backward_s")));
      m->set_communication_s(NumberOf(line.at("communication_s")));
      m->set_optimizer_s(NumberOf(line.at("optimizer_s")));
    }
    if (line.contains("loss_scale")) m->set_loss_scale(NumberOf(line["loss_scale"]));
    if (line.contains("eval_loss")) m->set_eval_loss(NumberOf(line["eval_loss"]));
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

absl::StatusOr<MetricsFile> MetricsFile::Open(const std::string& run_folder, int64_t step, size_t most_recent,
                                              std::vector<v1::StepMetrics>* recent) {
  MetricsFile file;
  file.path_ = JoinPath(run_folder, "metrics.jsonl");
  std::deque<v1::StepMetrics> kept;
  off_t end = 0;
  ASSIGN_OR_RETURN(file.fd_, OpenRegularIn(AT_FDCWD, file.path_, O_RDWR | O_CREAT | O_APPEND, 0644, file.path_));
  std::ifstream in("/proc/self/fd/" + std::to_string(file.fd_.get()), std::ios::binary);   // what was opened, whatever has its name by now
  if (!in.is_open()) return ErrnoStatus(errno, "cannot read", file.path_);
  std::string line;
  int64_t last = 0;
  while (std::getline(in, line) && !in.eof()) {   // at eof: a last line without its newline
    v1::StepMetrics metrics;
    // Steps rise by one: whatever breaks the row (zeros after a power failure, say) and what follows are cut off.
    if (!ParseMetricsLine(line, &metrics) || metrics.step() > step || metrics.step() <= last) break;
    last = metrics.step();
    end += off_t(line.size()) + 1;
    kept.push_back(std::move(metrics));
    if (kept.size() > most_recent) kept.pop_front();
  }
  in.close();
  if (ftruncate(file.fd_.get(), end) != 0) return ErrnoStatus(errno, "cannot cut", file.path_);
  file.size_ = end;
  if (recent != nullptr) recent->assign(kept.begin(), kept.end());
  return file;
}

absl::Status MetricsFile::Append(const v1::StepMetrics& metrics) {
  pending_ += MetricsLine(metrics) + "\n";
  return Flush();
}

absl::Status MetricsFile::Flush() {
  if (pending_.empty()) return absl::OkStatus();
  // One write a line: a reader that follows the file sees whole lines.
  const absl::Status written = WriteAll(fd_.get(), pending_, path_);
  if (!written.ok()) {
    // What part of a line went out is taken back, or the next try would double it.
    if (ftruncate(fd_.get(), size_) != 0) return ErrnoStatus(errno, "cannot cut", path_);
    return written;
  }
  size_ += int64_t(pending_.size());
  pending_.clear();
  return absl::OkStatus();
}

absl::Status MetricsFile::SyncFlushed() const {
  if (fdatasync(fd_.get()) != 0) return ErrnoStatus(errno, "cannot sync", path_);
  return absl::OkStatus();
}

}  // namespace hierad
