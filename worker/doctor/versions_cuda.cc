#include <cuda_runtime_api.h>
#include <nccl.h>

#include "worker/doctor/doctor.h"

namespace hierad {

LibraryVersions BuiltWith() {
  LibraryVersions versions;
  cudaRuntimeGetVersion(&versions.cuda_runtime);
  ncclGetVersion(&versions.nccl);
  return versions;
}

}  // namespace hierad
