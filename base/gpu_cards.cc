#include "base/gpu_cards.h"

#include <dlfcn.h>

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
  // Asked only where they are there.
  int (*driver)(char*, unsigned);
  int (*cuda)(int*);
  int (*clock)(Device, int, unsigned*);
  int (*most_clock)(Device, int, unsigned*);
  int (*temperature)(Device, int, unsigned*);
  int (*slowed)(Device, unsigned long long*);
  int (*ecc)(Device, unsigned*, unsigned*);
  int (*ecc_errors)(Device, int, int, unsigned long long*);
};

constexpr int kSmClock = 1, kGpuTemperature = 0, kUncorrected = 1, kOverLife = 1;

template <typename Function>
bool LoadSymbol(void* library, const char* symbol, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, symbol));
  return *function != nullptr;
}

bool LoadNvml(void* library, Nvml* nvml) {
  LoadSymbol(library, "nvmlSystemGetDriverVersion", &nvml->driver);
  LoadSymbol(library, "nvmlSystemGetCudaDriverVersion_v2", &nvml->cuda);
  LoadSymbol(library, "nvmlDeviceGetClockInfo", &nvml->clock);
  LoadSymbol(library, "nvmlDeviceGetMaxClockInfo", &nvml->most_clock);
  LoadSymbol(library, "nvmlDeviceGetTemperature", &nvml->temperature);
  LoadSymbol(library, "nvmlDeviceGetCurrentClocksThrottleReasons", &nvml->slowed);
  LoadSymbol(library, "nvmlDeviceGetEccMode", &nvml->ecc);
  LoadSymbol(library, "nvmlDeviceGetTotalEccErrors", &nvml->ecc_errors);
  return LoadSymbol(library, "nvmlInit_v2", &nvml->init) &&
         LoadSymbol(library, "nvmlShutdown", &nvml->shutdown) &&
         LoadSymbol(library, "nvmlDeviceGetCount_v2", &nvml->count) &&
         LoadSymbol(library, "nvmlDeviceGetHandleByIndex_v2", &nvml->by_index) &&
         LoadSymbol(library, "nvmlDeviceGetUUID", &nvml->uuid) &&
         LoadSymbol(library, "nvmlDeviceGetName", &nvml->name) &&
         LoadSymbol(library, "nvmlDeviceGetMemoryInfo", &nvml->memory);
}

void ReadCondition(const Nvml& nvml, Nvml::Device device, GpuCard* card) {
  unsigned value = 0, pending = 0;
  unsigned long long bits = 0;
  if (nvml.clock && nvml.clock(device, kSmClock, &value) == 0) card->sm_mhz = int(value);
  if (nvml.most_clock && nvml.most_clock(device, kSmClock, &value) == 0) card->most_sm_mhz = int(value);
  if (nvml.temperature && nvml.temperature(device, kGpuTemperature, &value) == 0) card->temperature_c = int(value);
  if (nvml.slowed && nvml.slowed(device, &bits) == 0) card->slowed = bits;
  if (nvml.ecc && nvml.ecc(device, &value, &pending) == 0) card->ecc = value != 0;
  if (nvml.ecc_errors && nvml.ecc_errors(device, kUncorrected, kOverLife, &bits) == 0) card->uncorrected_errors = bits;
}

void ReadAll(const Nvml& nvml, GpuCards* all) {
  char text[128] = "";
  if (nvml.driver && nvml.driver(text, sizeof text) == 0) all->driver = text;
  if (nvml.cuda) nvml.cuda(&all->cuda);
  unsigned count = 0;
  if (nvml.count(&count) != 0) count = 0;
  for (unsigned i = 0; i < count; ++i) {
    Nvml::Device device = nullptr;
    char uuid[128] = "", name[128] = "";
    Nvml::Memory memory{};
    if (nvml.by_index(i, &device) != 0 || nvml.uuid(device, uuid, sizeof uuid) != 0 ||
        nvml.name(device, name, sizeof name) != 0 || nvml.memory(device, &memory) != 0) {
      all->silent.push_back(i);
      continue;
    }
    GpuCard& card = all->cards.emplace_back();
    card.index = i;
    card.uuid = uuid;
    card.name = name;
    card.memory_bytes = int64_t(memory.total);
    card.free_bytes = int64_t(memory.free);
    ReadCondition(nvml, device, &card);
  }
}

}  // namespace

GpuCards ReadGpuCards(const std::string& library_name) {
  GpuCards all;
  void* library = dlopen(library_name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return all;
  all.library = true;
  Nvml nvml{};
  if (!LoadNvml(library, &nvml)) {
    all.problem = library_name + " lacks functions that every NVML has";
  } else if (const int error = nvml.init(); error != 0) {
    all.problem = library_name + " is there but does not start (error " + std::to_string(error) + "); see nvidia-smi";
  } else {
    ReadAll(nvml, &all);
    nvml.shutdown();
  }
  dlclose(library);
  return all;
}

bool NamesCard(const std::string& entry, unsigned index, const std::string& uuid) {
  if (entry == std::to_string(index)) return true;
  return entry.size() > 4 && uuid.compare(0, entry.size(), entry) == 0;
}

}  // namespace hierad
