#include "tests/parity/tensor_file.h"

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>
#include <vector>

namespace hierad::parity {
namespace {

at::ScalarType TypeOf(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "F64") return at::kDouble;
  if (name == "I64") return at::kLong;
  if (name == "BOOL") return at::kBool;
  if (name == "U8") return at::kByte;
  throw std::runtime_error("tensor type " + name + " is not expected");
}

}  // namespace

TensorMap ReadTensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), 8);
  if (!file || header_bytes > (100u << 20)) throw std::runtime_error(path + " is not a tensor file");
  std::string header(header_bytes, ' ');
  file.read(header.data(), std::streamsize(header_bytes));
  const nlohmann::json index = nlohmann::json::parse(header);
  TensorMap tensors;
  for (const auto& [name, entry] : index.items()) {
    if (name == "__metadata__") continue;
    at::Tensor tensor = at::empty(entry["shape"].get<std::vector<int64_t>>(), TypeOf(entry["dtype"]));
    file.seekg(std::streamoff(8 + header_bytes + entry["data_offsets"][0].get<uint64_t>()));
    file.read(static_cast<char*>(tensor.data_ptr()), std::streamsize(tensor.nbytes()));
    if (!file) throw std::runtime_error(path + " ends inside " + name);
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

void WriteTensors(const std::string& path, const TensorMap& tensors) {
  nlohmann::json index;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const bool real = tensor.is_floating_point();
    const uint64_t bytes = uint64_t(tensor.numel()) * (real ? 4 : 8);
    index[name] = {{"dtype", real ? "F32" : "I64"}, {"shape", tensor.sizes().vec()}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string header = index.is_null() ? "{}" : index.dump();
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const uint64_t header_bytes = header.size();
  file.write(reinterpret_cast<const char*>(&header_bytes), 8);
  file << header;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor host = tensor.detach().to(at::kCPU, tensor.is_floating_point() ? at::kFloat : at::kLong).contiguous();
    file.write(static_cast<const char*>(host.data_ptr()), std::streamsize(host.nbytes()));
  }
  if (!file.flush()) throw std::runtime_error(path + " could not be written");
}

}  // namespace hierad::parity
