// Faults that the driver reports of this machine's cards (Xid, memory errors that ECC cannot mend), heard through NVML's events: no
// rights to the kernel's log are needed. The library is loaded at run time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace hierad {

struct GpuFault {
  std::string uuid;           // of the card
  bool double_bit = false;    // an error of memory that ECC cannot mend; else an Xid
  uint64_t xid = 0;
};

// "Xid 79 (the GPU has fallen off the bus): ..." with what to do.
std::string GpuFaultWords(bool double_bit, uint64_t xid);

// The card is not to be trusted before it was looked after. False: an Xid that programs cause too.
bool IsFaultOfCard(bool double_bit, uint64_t xid);

class GpuFaults {
 public:
  // `on_fault` is called on a thread of its own. Null: no NVML, or no card that tells of faults.
  static std::unique_ptr<GpuFaults> Watch(const std::string& nvml, std::function<void(const GpuFault&)> on_fault);
  // No call of `on_fault` begins after it. A driver that hangs is not waited for.
  ~GpuFaults();

 private:
  struct Watcher;
  explicit GpuFaults(std::shared_ptr<Watcher> watcher);
  const std::shared_ptr<Watcher> watcher_;   // the thread's too
};

}  // namespace hierad
