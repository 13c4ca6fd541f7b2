#include "worker/metrics/event_file.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/fs_descriptor.h"
#include "base/status.h"

namespace hierad {
namespace {

// tensorflow/core/util/event.proto, framework/summary.proto: the fields used.
//   Event       1 double wall_time, 2 int64 step, 3 string file_version, 5 Summary summary, 7 SessionLog session_log
//   Summary     1 repeated Value;  Value  1 string tag, 2 float simple_value, 4 Image image
//   Image       1 int32 height, 2 int32 width, 3 int32 colorspace (3: RGB), 4 bytes encoded_image_string
//   SessionLog  1 enum status (1: START)
void PutFixed(uint64_t value, int bytes, std::string* out) {
  for (int i = 0; i < bytes; ++i) out->push_back(char(value >> (8 * i)));
}
void PutVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(char(value | 0x80));
  out->push_back(char(value));
}
void PutInt(int field, int64_t value, std::string* out) {
  PutVarint(uint64_t(field) << 3, out);
  PutVarint(uint64_t(value), out);
}
void PutDouble(int field, double value, std::string* out) {
  PutVarint(uint64_t(field) << 3 | 1, out);
  PutFixed(std::bit_cast<uint64_t>(value), 8, out);
}
void PutFloat(int field, float value, std::string* out) {
  PutVarint(uint64_t(field) << 3 | 5, out);
  PutFixed(std::bit_cast<uint32_t>(value), 4, out);
}
void PutBytes(int field, std::string_view value, std::string* out) {
  PutVarint(uint64_t(field) << 3 | 2, out);
  PutVarint(value.size(), out);
  out->append(value);
}

std::string EventAt(int64_t time_ms, int64_t step) {
  std::string event;
  PutDouble(1, double(time_ms) / 1000, &event);
  PutInt(2, step, &event);
  return event;
}

void PutScalar(const char* tag, double value, std::string* summary) {
  std::string entry;
  PutBytes(1, tag, &entry);
  PutFloat(2, float(value), &entry);
  PutBytes(1, entry, summary);
}

uint32_t MaskedSum(std::string_view data) {
  const uint32_t sum = Crc32c(data);
  return ((sum >> 15) | (sum << 17)) + 0xA282EAD8u;
}

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name[0] != '\0' ? name : "localhost";
}

}  // namespace

std::string TfRecord(std::string_view data) {
  std::string record;
  PutFixed(data.size(), 8, &record);
  PutFixed(MaskedSum(record), 4, &record);
  record.append(data);
  PutFixed(MaskedSum(data), 4, &record);
  return record;
}

absl::StatusOr<EventFile> EventFile::Open(const std::string& run_folder, int64_t step) {
  EventFile file;
  const int64_t now_ms = Clock::System().UnixMs();
  // TensorBoard reads a folder's files in the order of their names, and knows them by the word tfevents.
  char name[128];
  std::snprintf(name, sizeof name, "events.out.tfevents.%010lld.%03lld.", static_cast<long long>(now_ms / 1000), static_cast<long long>(now_ms % 1000));
  file.path_ = JoinPath(run_folder, std::string(name) + HostName());
  ASSIGN_OR_RETURN(file.fd_, OpenRegularIn(AT_FDCWD, file.path_, O_WRONLY | O_CREAT | O_APPEND, 0644, file.path_));
  file.flushed_ = Clock::System().Monotonic();
  std::string version, start = EventAt(now_ms, step + 1), log;
  PutDouble(1, double(now_ms) / 1000, &version);
  PutBytes(3, "brain.Event:2", &version);
  RETURN_IF_ERROR(file.Write(version));
  PutInt(1, 1, &log);
  PutBytes(7, log, &start);
  RETURN_IF_ERROR(file.Write(start));
  RETURN_IF_ERROR(file.Flush());
  return file;
}

absl::Status EventFile::Add(const v1::StepMetrics& m) {
  std::string event = EventAt(m.time_ms(), m.step()), summary;
  PutScalar("loss", m.loss(), &summary);
  PutScalar("grad_norm", m.grad_norm(), &summary);
  PutScalar("lr", m.lr(), &summary);
  PutScalar("epoch", m.epoch(), &summary);
  if (m.step_s() > 0) PutScalar("samples_per_s", double(m.samples()) / m.step_s(), &summary);
  PutScalar("time/step_s", m.step_s(), &summary);
  PutScalar("time/data_wait_s", m.data_wait_s(), &summary);
  if (m.forward_s() > 0) {
    PutScalar("time/forward_s", m.forward_s(), &summary);
    PutScalar("time/backward_s", m.backward_s(), &summary);
    PutScalar("time/communication_s", m.communication_s(), &summary);
    PutScalar("time/optimizer_s", m.optimizer_s(), &summary);
  }
  if (m.has_loss_scale()) PutScalar("loss_scale", m.loss_scale(), &summary);
  if (m.has_eval_loss()) PutScalar("eval/loss", m.eval_loss(), &summary);
  PutBytes(5, summary, &event);
  return Write(event);
}

absl::Status EventFile::AddPicture(int64_t step, const std::string& tag, int width, int height, const std::string& png) {
  std::string image, entry, summary, event = EventAt(Clock::System().UnixMs(), step);
  PutInt(1, height, &image);
  PutInt(2, width, &image);
  PutInt(3, 3, &image);
  PutBytes(4, png, &image);
  PutBytes(1, tag, &entry);
  PutBytes(4, image, &entry);
  PutBytes(1, entry, &summary);
  PutBytes(5, summary, &event);
  return Write(event);
}

absl::Status EventFile::Write(const std::string& event) {
  pending_ += TfRecord(event);
  if (pending_.size() < kBufferBytes && Clock::System().Monotonic() - flushed_ < kFlushEvery) return absl::OkStatus();
  return Flush();
}

absl::Status EventFile::Flush() {
  flushed_ = Clock::System().Monotonic();
  if (pending_.empty()) return absl::OkStatus();
  const absl::Status written = WriteAll(fd_.get(), pending_, path_);
  pending_.clear();   // part of it may be there: a second try would double it
  return written;
}

}  // namespace hierad
