// Stands for libnvidia-ml.so.1 in tests: two cards, of which HIERAD_FAKE_NVML_BROKEN names one that does not answer. Lines that are
// appended to the file HIERAD_FAKE_NVML_EVENTS, "CARD xid NUMBER" or "CARD ecc", become events.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
struct Memory {
  unsigned long long total, free, used;
};
int cards[2] = {0, 1};
bool initialised = false;
unsigned long long wanted[2] = {0, 0};   // events, by card
long events_read = 0;                    // bytes of their file
struct Event {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
constexpr unsigned long long kEcc = 2, kXid = 8;
}  // namespace

extern "C" {
int nvmlInit_v2() {
  initialised = true;
  return std::getenv("HIERAD_FAKE_NVML_NO_DRIVER") != nullptr ? 9 : 0;
}
int nvmlShutdown() {
  initialised = false;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return initialised ? 0 : 1;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &cards[index];
  const char* broken = std::getenv("HIERAD_FAKE_NVML_BROKEN");
  return broken != nullptr && unsigned(std::atoi(broken)) == index ? 15 : 0;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  std::strncpy(text, *static_cast<int*>(device) == 0 ? "GPU-aaaa-0" : "GPU-bbbb-1", size);
  return 0;
}
int nvmlDeviceGetName(void*, char* text, unsigned size) {
  std::strncpy(text, "Imaginary 9000", size);
  return 0;
}
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::strncpy(text, "580.82.07", size);
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}
int nvmlDeviceGetClockInfo(void*, int, unsigned* mhz) {
  *mhz = 345;
  return 0;
}
int nvmlDeviceGetMaxClockInfo(void*, int, unsigned* mhz) {
  *mhz = 1980;
  return 0;
}
// The second card is hot and has no ECC; its errors it does not tell.
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* bits) {
  *bits = *static_cast<int*>(device) == 0 ? 1 : 0x20;
  return 0;
}
int nvmlDeviceGetEccMode(void* device, unsigned* now, unsigned* pending) {
  *now = *pending = *static_cast<int*>(device) == 0 ? 1 : 0;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void* device, int, int, unsigned long long* errors) {
  *errors = 3;
  return *static_cast<int*>(device) == 0 ? 0 : 3;
}
int nvmlDeviceGetSupportedEventTypes(void*, unsigned long long* types) {
  *types = kEcc | kXid | 1;
  return 0;
}
int nvmlEventSetCreate(void** set) {
  *set = wanted;
  return 0;
}
int nvmlDeviceRegisterEvents(void* device, unsigned long long types, void* set) {
  static_cast<unsigned long long*>(set)[*static_cast<int*>(device)] = types;
  return 0;
}
int nvmlEventSetWait_v2(void* set, Event* event, unsigned timeout_ms) {
  const char* path = std::getenv("HIERAD_FAKE_NVML_EVENTS");
  for (unsigned waited = 0;; waited += 10) {
    std::FILE* file = path != nullptr ? std::fopen(path, "r") : nullptr;
    char line[64] = "";
    if (file != nullptr && std::fseek(file, events_read, SEEK_SET) == 0 && std::fgets(line, sizeof line, file) != nullptr && std::strchr(line, '\n') != nullptr) {
      events_read = std::ftell(file);
    } else {
      line[0] = 0;
    }
    if (file != nullptr) std::fclose(file);
    int card = 0;
    unsigned long long xid = 0;
    const bool is_xid = std::sscanf(line, "%d xid %llu", &card, &xid) == 2;
    if (is_xid || std::strstr(line, "ecc") != nullptr) {
      card = line[0] - '0';
      *event = {&cards[card], is_xid ? kXid : kEcc, xid, ~0u, ~0u};
      if ((static_cast<unsigned long long*>(set)[card] & event->type) != 0) return 0;
    }
    if (waited >= timeout_ms) return 10;
    usleep(10'000);
  }
}
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {96ull << 30, 95ull << 30, 1ull << 30};
  return 0;
}
}
