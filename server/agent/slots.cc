#include "server/agent/slots.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "base/status.h"
#include "spdlog/spdlog.h"

namespace hierad {
namespace {

// The few functions used of nvml.h, declared by hand: the library's ABI is stable by its _v2 names.
struct Nvml {
  using Device = void*;
  struct Memory {
    unsigned long long total, free, used;
  };
  int (*init)();
  int (*shutdown)();
  int (*count)(unsigned*);
  int (*by_index)(unsigned, Device*);
  int (*uuid)(Device, char*, unsigned);
  int (*name)(Device, char*, unsigned);
  int (*memory)(Device, Memory*);
};

template <typename Function>
bool LoadSymbol(void* library, const char* symbol, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, symbol));
  return *function != nullptr;
}

bool LoadNvml(void* library, Nvml* nvml) {
  return LoadSymbol(library, "nvmlInit_v2", &nvml->init) &&
         LoadSymbol(library, "nvmlShutdown", &nvml->shutdown) &&
         LoadSymbol(library, "nvmlDeviceGetCount_v2", &nvml->count) &&
         LoadSymbol(library, "nvmlDeviceGetHandleByIndex_v2", &nvml->by_index) &&
         LoadSymbol(library, "nvmlDeviceGetUUID", &nvml->uuid) &&
         LoadSymbol(library, "nvmlDeviceGetName", &nvml->name) &&
         LoadSymbol(library, "nvmlDeviceGetMemoryInfo", &nvml->memory);
}

bool Visible(const char* visible_devices, unsigned index, const std::string& uuid) {
  if (visible_devices == nullptr) return true;
  std::istringstream list(visible_devices);
  for (std::string entry; std::getline(list, entry, ',');) {
    if (entry == std::to_string(index)) return true;
    if (entry.size() > 4 && uuid.compare(0, entry.size(), entry) == 0) return true;
  }
  return false;
}

std::vector<v1::Slot> GpuSlots(const SlotOptions& options) {
  std::vector<v1::Slot> slots;
  void* library = dlopen(options.nvml.c_str(), RTLD_NOW | RTLD_LOCAL);
  Nvml nvml{};
  if (library == nullptr) return slots;
  if (!LoadNvml(library, &nvml) || nvml.init() != 0) {
    spdlog::warn("{} is there but does not start: no GPU slots; see nvidia-smi", options.nvml);
    dlclose(library);
    return slots;
  }
  unsigned count = 0;
  if (nvml.count(&count) != 0) count = 0;
  for (unsigned i = 0; i < count; ++i) {
    Nvml::Device device = nullptr;
    char uuid[128] = "", name[128] = "";
    Nvml::Memory memory{};
    if (nvml.by_index(i, &device) != 0 || nvml.uuid(device, uuid, sizeof uuid) != 0 ||
        nvml.name(device, name, sizeof name) != 0 || nvml.memory(device, &memory) != 0) {
      spdlog::warn("GPU {} does not answer and is left out; see nvidia-smi", i);
      continue;
    }
    if (!Visible(options.cuda_visible_devices, i, uuid)) continue;
    v1::Slot& slot = slots.emplace_back();
    slot.set_id(uuid);
    slot.set_kind(v1::Slot::CUDA);
    slot.set_model(name);
    slot.set_memory_bytes(int64_t(memory.total));
  }
  nvml.shutdown();
  dlclose(library);
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
