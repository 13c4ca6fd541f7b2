#include "base/gpu_faults.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace hierad {
namespace {

// Of nvml.h, declared by hand.
struct EventData {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
constexpr unsigned long long kDoubleBitEcc = 0x2, kXidCritical = 0x8;
constexpr int kTimeout = 10;       // NVML_ERROR_TIMEOUT
constexpr unsigned kWaitMs = 500;

struct Nvml {
  int (*init)();
  int (*count)(unsigned*);
  int (*by_index)(unsigned, void**);
  int (*uuid)(void*, char*, unsigned);
  int (*supported)(void*, unsigned long long*);
  int (*make_set)(void**);
  int (*subscribe)(void*, unsigned long long, void*);
  int (*wait)(void*, EventData*, unsigned);

  bool Load(void* library) {
    const auto load = [library](const char* symbol, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, symbol));
      return *function != nullptr;
    };
    return load("nvmlInit_v2", &init) && load("nvmlDeviceGetCount_v2", &count) && load("nvmlDeviceGetHandleByIndex_v2", &by_index) &&
           load("nvmlDeviceGetUUID", &uuid) && load("nvmlDeviceGetSupportedEventTypes", &supported) && load("nvmlEventSetCreate", &make_set) &&
           load("nvmlDeviceRegisterEvents", &subscribe) && load("nvmlEventSetWait_v2", &wait);
  }
};

struct Meaning {
  uint64_t xid;
  const char* words;
};
// The frequent ones of NVIDIA's list.
constexpr Meaning kMeanings[] = {
    {13, "an exception in a kernel): a fault of the program or of the card; if it comes back on this card alone, have the card tested"},
    {31, "an access to memory that is not there): a fault of the program or, more rarely, of the card; if it comes back on this card alone, have it tested"},
    {43, "the card stopped the program's work): see the Xid before it in the kernel's log"},
    {45, "the program's work was cleared after another error): see the Xid before it in the kernel's log"},
    {48, "an error of memory that ECC cannot mend): reset the card (nvidia-smi -r) before it is used again; if it comes back, replace it"},
    {62, "an internal controller has halted): reset the card or restart the machine"},
    {63, "a row of memory was replaced): reset the card (nvidia-smi -r) when no job runs there"},
    {64, "a bad row of memory could not be replaced): reset the card; if it comes back, replace it"},
    {74, "an error of NVLink): see nvidia-smi nvlink -e; reset the cards or restart the machine, and check the bridge if it comes back"},
    {79, "the card has fallen off the bus): restart the machine; if it comes back, check the card's seat, power and heat"},
    {94, "an error of memory that hit this program alone): the job may go on; reset the card (nvidia-smi -r) when no job runs there"},
    {95, "an error of memory that may have hit any program): reset the card (nvidia-smi -r) before it is used again"},
    {119, "the card's system processor does not answer): reset the card or restart the machine"},
    {120, "the card's system processor has failed): reset the card or restart the machine"},
};
// A kernel's exception, a bad access, work that was stopped or cleared after those, a program that holds the card too long.
constexpr uint64_t kOfPrograms[] = {13, 31, 43, 45, 109};

}  // namespace

bool IsFaultOfCard(bool double_bit, uint64_t xid) {
  return double_bit || (xid != 0 && std::find(std::begin(kOfPrograms), std::end(kOfPrograms), xid) == std::end(kOfPrograms));
}

std::string GpuFaultWords(bool double_bit, uint64_t xid) {
  if (double_bit) return "a double-bit ECC error (memory that cannot be mended): reset the card (nvidia-smi -r) before it is used again; if it comes back, replace it";
  const std::string name = "Xid " + std::to_string(xid);
  for (const Meaning& meaning : kMeanings) {
    if (meaning.xid == xid) return name + " (" + meaning.words;
  }
  return name + ": see NVIDIA's list of Xid errors and nvidia-smi; reset the card (nvidia-smi -r) or restart the machine if it comes back";
}

struct GpuFaults::Watcher {
  Nvml nvml{};
  void* set = nullptr;
  std::map<void*, std::string> cards;   // handle -> UUID
  std::mutex mutex;
  std::function<void(const GpuFault&)> on_fault;   // none: nobody listens any more; guarded by mutex

  void Run() {
    while (true) {
      EventData event{};
      const int result = nvml.wait(set, &event, kWaitMs);
      std::unique_lock lock(mutex);
      if (!on_fault) return;
      if (result != 0) {
        lock.unlock();
        if (result != kTimeout) SleepFor(std::chrono::milliseconds(kWaitMs));   // a card that is lost answers at once, each time
        continue;
      }
      const auto card = cards.find(event.device);
      if (card != cards.end()) on_fault({card->second, event.type == kDoubleBitEcc, event.type == kXidCritical ? event.data : 0});
    }
  }
};

std::unique_ptr<GpuFaults> GpuFaults::Watch(const std::string& nvml, std::function<void(const GpuFault&)> on_fault) {
  void* library = dlopen(nvml.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  // The library stays for good: its thread may never come back.
  auto watcher = std::make_shared<Watcher>();
  unsigned count = 0;
  Nvml& api = watcher->nvml;
  if (!api.Load(library) || api.init() != 0 || api.count(&count) != 0 || api.make_set(&watcher->set) != 0) return nullptr;
  for (unsigned i = 0; i < count; ++i) {
    void* device = nullptr;
    char uuid[128] = "";
    unsigned long long types = 0;
    if (api.by_index(i, &device) != 0 || api.uuid(device, uuid, sizeof uuid) != 0 || api.supported(device, &types) != 0) continue;
    types &= kDoubleBitEcc | kXidCritical;
    if (types != 0 && api.subscribe(device, types, watcher->set) == 0) watcher->cards[device] = uuid;
  }
  if (watcher->cards.empty()) return nullptr;
  watcher->on_fault = std::move(on_fault);
  std::thread([watcher] { watcher->Run(); }).detach();
  return std::unique_ptr<GpuFaults>(new GpuFaults(std::move(watcher)));
}

GpuFaults::GpuFaults(std::shared_ptr<Watcher> watcher) : watcher_(std::move(watcher)) {}

GpuFaults::~GpuFaults() {
  std::lock_guard lock(watcher_->mutex);
  watcher_->on_fault = nullptr;
}

}  // namespace hierad
