#include "worker/step/accelerator.h"

namespace hierad {

std::unique_ptr<Accelerator> MakeCudaAccelerator() { return nullptr; }

}  // namespace hierad
