// What a node offers: a slot per GPU (by UUID) and CPU slots.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/gpu_cards.h"
#include "hierad/v1/worker.pb.h"

namespace hierad {

struct SlotOptions {
  int cpu_slots = -1;        // -1: one per core
  bool detect_gpus = true;
  // NVIDIA's management library, loaded at run time: a machine without it has no GPU slots.
  std::string nvml = kNvml;
  // As CUDA reads it: a list of indices, or of (beginnings of) UUIDs; only these are offered. Null: all.
  const char* cuda_visible_devices = nullptr;
};

// In stable order, GPUs first. No slot at all is FailedPrecondition.
absl::StatusOr<std::vector<v1::Slot>> DetectSlots(const SlotOptions& options);

int UsableCores();   // cores this process may run on, at least 1

}  // namespace hierad
