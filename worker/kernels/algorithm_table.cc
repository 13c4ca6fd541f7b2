#include "worker/kernels/algorithm_table.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cctype>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/status.h"

namespace hierad::kernels {
namespace {

constexpr int64_t kMostBytes = 4 << 20;   // of a cached table: some 20,000 shapes

// Empty: the environment names no home.
std::string CacheFolder() {
  if (const char* folder = std::getenv("HIERAD_CACHE"); folder != nullptr && *folder != 0) return folder;
  if (const char* folder = std::getenv("XDG_CACHE_HOME"); folder != nullptr && *folder != 0) return JoinPath(folder, "hierad");
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != 0) return JoinPath(home, ".cache/hierad");
  return "";
}

}  // namespace

std::string CachedAlgorithmsFile(const std::string& name) {
  const std::string folder = CacheFolder();
  return folder.empty() || name.empty() ? "" : JoinPath(folder, absl::StrCat(name, ".txt"));
}

std::string AlgorithmTableName() {
  cudaDeviceProp device{};
  int current = 0;
  if (cudaGetDevice(&current) != cudaSuccess || cudaGetDeviceProperties(&device, current) != cudaSuccess) return "";
  std::string name = device.name;
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '-';
  }
  return absl::StrCat(name, ".cublasLt-", cublasLtGetVersion());
}

std::string CachedAlgorithms(const std::string& name) {
  const std::string file = CachedAlgorithmsFile(name);
  if (file.empty() || !Exists(file)) return "";
  auto text = ReadFile(file, kMostBytes);
  return text.ok() ? *std::move(text) : "";
}

absl::Status CacheAlgorithms(const std::string& name, const std::string& text) {
  const std::string file = CachedAlgorithmsFile(name);
  if (file.empty()) {
    return ErrorOf(v1::REASON_USER_ERROR, "the algorithms found have no place to be kept: neither HIERAD_CACHE, XDG_CACHE_HOME nor HOME is set; set HIERAD_CACHE to a folder.");
  }
  RETURN_IF_ERROR(MakeFolders(FolderOf(file)));
  return WriteFileAtomic(file, text);
}

}  // namespace hierad::kernels
