// Tensors by name between the parity tool's two processes: the safetensors format, read and written here on purpose
// without worker/checkpoint, so that a fault there cannot hide itself.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>

namespace hierad::parity {

using TensorMap = std::map<std::string, at::Tensor>;

// Throws std::runtime_error. F32, F64, I64, BOOL and U8; results own their memory, on the CPU.
TensorMap ReadTensors(const std::string& path);
// Converts floating point to F32, else I64.
void WriteTensors(const std::string& path, const TensorMap& tensors);

}  // namespace hierad::parity
