// Stands for libnvidia-ml.so.1 in tests: two cards, of which HIERAD_FAKE_NVML_BROKEN names one that does not answer.
#include <cstdlib>
#include <cstring>

namespace {
struct Memory {
  unsigned long long total, free, used;
};
int cards[2] = {0, 1};
bool initialised = false;
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
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {96ull << 30, 95ull << 30, 1ull << 30};
  return 0;
}
}
