// The NVIDIA cards of this machine as the driver's management library (NVML) tells of them. The library is loaded at run
// time: no CUDA is needed, and a machine without it has no cards.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hierad {

inline constexpr char kNvml[] = "libnvidia-ml.so.1";

struct GpuCard {
  unsigned index = 0;             // NVML's, as nvidia-smi shows it
  std::string uuid, name;
  int64_t memory_bytes = 0, free_bytes = 0;
  // Not every card and driver tells these.
  std::optional<int> sm_mhz, most_sm_mhz, temperature_c;
  std::optional<uint64_t> slowed;              // bits of kSlowed...: why its clock is held down
  std::optional<bool> ecc;
  std::optional<uint64_t> uncorrected_errors;  // of memory, over the card's life
};
inline constexpr uint64_t kSlowedByHardware = 0x8, kSlowedByHeat = 0x20 | 0x40, kSlowedByPowerBrake = 0x80;

struct GpuCards {
  bool library = false;           // NVML is there
  std::string problem;            // it is there and does not start: why
  std::string driver;             // "580.82.07"
  int cuda = 0;                   // newest that the driver runs: 13000 is 13.0
  std::vector<GpuCard> cards;
  std::vector<unsigned> silent;   // indices of cards that do not answer
};
GpuCards ReadGpuCards(const std::string& nvml = kNvml);

// Whether an entry of CUDA_VISIBLE_DEVICES, an index or (the beginning of) a UUID, names the card.
bool NamesCard(const std::string& entry, unsigned index, const std::string& uuid);

}  // namespace hierad
