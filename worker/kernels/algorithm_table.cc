#include "worker/kernels/algorithm_table.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cctype>
#include <cstdlib>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/sha256.h"
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

absl::Status AlgorithmTable::Read(const std::string& text, size_t row_bytes, bool measured_here) {
  std::istringstream in(text);
  for (std::string key, hex; in >> key >> hex;) {
    const std::string bytes = absl::HexStringToBytes(hex);
    if (bytes.size() != row_bytes) {
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("algorithm table: the entry of ", key, " has ", bytes.size(), " bytes instead of ",
                                                         row_bytes, "; make the table again."));
    }
    rows_[key] = bytes;
    if (measured_here) measured_.insert(key);
  }
  return absl::OkStatus();
}

void AlgorithmTable::KeepMeasured(const std::string& key, const std::string& algorithm) {
  rows_[key] = algorithm;
  measured_.insert(key);
}

const std::string* AlgorithmTable::Find(const std::string& key) const {
  const auto found = rows_.find(key);
  return found == rows_.end() ? nullptr : &found->second;
}

std::string AlgorithmTable::Measured() const {
  std::string text;
  for (const auto& [key, algorithm] : rows_) {
    if (measured_.contains(key)) absl::StrAppend(&text, key, " ", absl::BytesToHexString(algorithm), "\n");
  }
  return text;
}

std::string AlgorithmTable::HashOf(const std::vector<std::string>& keys) const {
  std::string text;
  for (const std::string& key : std::set<std::string>(keys.begin(), keys.end())) {
    const std::string* const algorithm = Find(key);
    absl::StrAppend(&text, key, " ", algorithm == nullptr ? "library" : absl::BytesToHexString(*algorithm), "\n");
  }
  return Sha256Hex(text);
}

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

absl::StatusOr<std::string> CachedAlgorithms(const std::string& name) {
  const std::string file = CachedAlgorithmsFile(name);
  if (file.empty() || !Exists(file)) return "";
  return ReadFile(file, kMostBytes);
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
