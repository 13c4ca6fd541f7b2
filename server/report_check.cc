#include "server/report_check.h"

#include <cmath>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/attempt_log.h"
#include "base/limits.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr int64_t kCounter = int64_t{1} << 50;   // of bytes or samples: sums over ranks stay far from overflow
constexpr int kSlots = 1024;            // of one node
constexpr int kLogPieces = 2 * limits::kLogPieces;   // of one report: those of the orders before too
constexpr int kGpuFaults = 256;         // of one report
constexpr int kProcesses = 8192;        // of one node, ended ones not yet acknowledged included
constexpr int kNameBytes = 253;         // a host name
constexpr int kSlotIdBytes = 128;       // a GPU's UUID has 40
constexpr int kCheckpoints = 10000;     // checkpoint.keep_last's limit
constexpr size_t kRendezvousBytes = 4096;   // an ncclUniqueId has 128
constexpr size_t kPathBytes = 4096;

absl::Status Bad(const std::string& what) { return absl::InvalidArgumentError(absl::StrCat("refused report: ", what)); }

bool IsName(const std::string& text, size_t most) {
  if (text.empty() || text.size() > most) return false;
  for (unsigned char c : text) {
    if (c <= ' ' || c >= 127) return false;
  }
  return true;
}

}  // namespace

absl::Status CheckAgentReport(const v1::AgentReport& report) {
  if (!IsName(report.node(), kNameBytes)) {
    return Bad(absl::StrCat("node \"", Printable(report.node()), "\" is not a name of 1 to ", kNameBytes, " printable characters without spaces"));
  }
  if (!IsName(report.instance(), 128)) return Bad("instance is not a name of 1 to 128 printable characters");
  if (report.version().size() > 128) return Bad("version is longer than 128 bytes");
  if (report.slots_size() > kSlots) return Bad(absl::StrCat(report.slots_size(), " slots, at most ", kSlots));
  if (report.processes_size() > kProcesses) return Bad(absl::StrCat(report.processes_size(), " processes, at most ", kProcesses));
  if (report.gpu_faults_size() > kGpuFaults) return Bad(absl::StrCat(report.gpu_faults_size(), " faults of GPUs, at most ", kGpuFaults));
  for (const v1::GpuFault& fault : report.gpu_faults()) {
    if (fault.age_ms() < 0 || fault.slot_id().size() > kSlotIdBytes) return Bad("a fault of a GPU with an illegal age or slot");
  }
  if (report.log_pieces_size() > kLogPieces) return Bad(absl::StrCat(report.log_pieces_size(), " pieces of logs, at most ", kLogPieces));
  for (const v1::LogPiece& piece : report.log_pieces()) {
    if (piece.offset() < 0 || piece.offset() > kCounter || piece.bytes().size() > size_t{limits::kLogChunkBytes} || piece.problem().size() > size_t{4 * limits::kMessageBytes} ||
        piece.head().size() > kLogHeadBytes) {
      return Bad("a piece of a log with an illegal place or length");
    }
  }
  std::set<std::string> ids;
  for (const v1::Slot& slot : report.slots()) {
    if (!IsName(slot.id(), kSlotIdBytes)) return Bad(absl::StrCat("slot id \"", Printable(slot.id()), "\" is not a name"));
    if (!ids.insert(slot.id()).second) return Bad(absl::StrCat("slot id \"", slot.id(), "\" twice"));
    if (slot.kind() != v1::Slot::CPU && slot.kind() != v1::Slot::CUDA) return Bad(absl::StrCat("slot ", slot.id(), " is neither CPU nor CUDA"));
    if (slot.model().size() > 256) return Bad(absl::StrCat("slot ", slot.id(), ": model is longer than 256 bytes"));
  }
  for (const v1::RankProcess& process : report.processes()) {
    if (process.attempt() < 1 || process.rank() < 0) return Bad("a process with attempt < 1 or rank < 0");
    if (process.slot_id().size() > kSlotIdBytes) return Bad("a process with a slot id that is too long");
    if (process.last_words().size() > 4 * limits::kLastWordsBytes) return Bad("a process with too long last words");
    if (!v1::Reason_IsValid(process.reason())) return Bad("a process with an unknown reason");
  }
  return absl::OkStatus();
}

absl::Status CheckWorkerReport(const v1::WorkerReport& report) {
  if (report.attempt() < 1 || report.rank() < 0) return Bad("attempt < 1 or rank < 0");
  if (report.credential().size() > 128) return Bad("credential is longer than 128 bytes");
  if (!v1::Phase_IsValid(report.phase())) return Bad("unknown phase");
  if (report.step() < 0 || report.total_steps() < 0 || report.first_step() < 0 || report.nan_steps() < 0) return Bad("a step below 0");
  if (report.metrics_size() > limits::kMetricBatch) return Bad(absl::StrCat(report.metrics_size(), " metrics, at most ", limits::kMetricBatch));
  if (report.checkpoints_size() > kCheckpoints) return Bad(absl::StrCat(report.checkpoints_size(), " checkpoints, at most ", kCheckpoints));
  for (const v1::CheckpointInfo& info : report.checkpoints()) {
    if (info.path().empty() || info.path()[0] != '/' || info.path().size() > kPathBytes || info.sha256().size() > 64 || info.step() < 0) {
      return Bad("a checkpoint with an illegal path, hash or step");
    }
  }
  if (report.rendezvous().size() > kRendezvousBytes) return Bad(absl::StrCat("rendezvous of ", report.rendezvous().size(), " bytes, at most ", kRendezvousBytes));
  if (report.waiting_in().size() > 1024) return Bad("waiting_in is longer than 1024 bytes");
  if (report.data().slowest().size() > 1024) return Bad("data.slowest is longer than 1024 bytes");
  const v1::DataCounters& data = report.data();
  for (const int64_t count : {data.bytes(), data.samples(), int64_t{data.threads()}, data.skipped_samples()}) {
    if (count < 0 || count > kCounter) return Bad(absl::StrCat("data: a count of ", count, ", which is not in [0, ", kCounter, "]"));
  }
  for (const double seconds : {data.wait_s(), data.slowest_s()}) {
    if (!(seconds >= 0 && std::isfinite(seconds))) return Bad("data: seconds below 0 or not finite");
  }
  if (report.has_end()) {
    if (!v1::Reason_IsValid(report.end().reason())) return Bad("unknown reason of the end");
    if (report.end().message().size() > 64 << 10) return Bad("a message of the end that is too long");
  }
  return absl::OkStatus();
}

}  // namespace hierad
