#include "server/agent/slots.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "base/gpu_cards.h"
#include "base/status.h"
#include "spdlog/spdlog.h"

namespace hierad {
namespace {

bool Visible(const char* visible_devices, const GpuCard& card) {
  if (visible_devices == nullptr) return true;
  std::istringstream list(visible_devices);
  for (std::string entry; std::getline(list, entry, ',');) {
    if (NamesCard(entry, card.index, card.uuid)) return true;
  }
  return false;
}

std::vector<v1::Slot> GpuSlots(const SlotOptions& options) {
  std::vector<v1::Slot> slots;
  const GpuCards all = ReadGpuCards(options.nvml);
  if (!all.problem.empty()) spdlog::warn("no GPU slots: {}", all.problem);
  for (const unsigned index : all.silent) spdlog::warn("GPU {} does not answer and is left out; see nvidia-smi", index);
  for (const GpuCard& card : all.cards) {
    if (!Visible(options.cuda_visible_devices, card)) continue;
    v1::Slot& slot = slots.emplace_back();
    slot.set_id(card.uuid);
    slot.set_kind(v1::Slot::CUDA);
    slot.set_model(card.name);
    slot.set_memory_bytes(card.memory_bytes);
  }
  for (v1::Slot& slot : slots) slot.set_threads(std::max(1, UsableCores() / int(slots.size())));
  return slots;
}

std::string ProcessorName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t value = line.find(": ");
    if (value != std::string::npos) return line.substr(value + 2);
  }
  return "cpu";
}

}  // namespace

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails on machines with more than 1024 cores.
  if (sched_getaffinity(0, sizeof set, &set) != 0) return std::max(1, int(sysconf(_SC_NPROCESSORS_ONLN)));
  return std::max(1, CPU_COUNT(&set));
}

absl::StatusOr<std::vector<v1::Slot>> DetectSlots(const SlotOptions& options) {
  std::vector<v1::Slot> slots;
  if (options.detect_gpus) slots = GpuSlots(options);
  const int cores = UsableCores();
  const int cpu_slots = options.cpu_slots < 0 ? cores : options.cpu_slots;
  const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const std::string model = ProcessorName();
  for (int i = 0; i < cpu_slots; ++i) {
    v1::Slot& slot = slots.emplace_back();
    slot.set_id("cpu-" + std::to_string(i));
    slot.set_kind(v1::Slot::CPU);
    slot.set_model(model);
    slot.set_memory_bytes(memory / cpu_slots);
    slot.set_threads(std::max(1, cores / cpu_slots));
  }
  if (slots.empty()) {
    return absl::FailedPreconditionError(
        "this node offers no slot: no GPU was found and --cpu-slots is 0; give --cpu-slots 1 or more");
  }
  return slots;
}

}  // namespace hierad
