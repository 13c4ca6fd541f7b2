// Files made for the tests of this room.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/plan/geometry.h"
#include "base/subprocess.h"
#include "gtest/gtest.h"

namespace hierad {

// A sanitizer's own memory is beyond any limit of address space.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// A folder of its own, removed at the end.
class TestFolder {
 public:
  TestFolder() {
    std::string name = testing::TempDir() + "hierad-data-XXXXXX";
    if (!mkdtemp(name.data())) std::abort();
    path_ = name;
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  std::string Path(const std::string& name) const { return path_ + "/" + name; }
  std::string Write(const std::string& name, std::string_view content) const {
    const std::string path = Path(name);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

 private:
  std::string path_;
};

// Runs a program in the tests' Python with the folder as its argument; what it prints.
inline std::string RunPython(const TestFolder& folder, const std::string& program) {
  const char* python = std::getenv("HIERAD_PYTHON");
  if (!python || access(python, X_OK) != 0) {
    ADD_FAILURE() << "HIERAD_PYTHON must name the Python that tools/setup made";
    return "";
  }
  SubprocessOptions options;
  options.argv = {python, folder.Write("program.py", program), folder.Path("")};
  const auto result = RunCommand(options, std::chrono::seconds(100));
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return "";
  EXPECT_TRUE(result->exit.ok()) << result->err;
  return result->out;
}

// What the data room looks at.
inline Geometry InputGeometry(int in_chans, std::vector<int64_t> input_size) {
  Geometry geometry{};
  geometry.spec.set_in_chans(in_chans);
  for (int64_t axis : input_size) geometry.spec.add_input_size(static_cast<int>(axis));
  geometry.dims = static_cast<int>(input_size.size());
  geometry.input_size = std::move(input_size);
  return geometry;
}

// An npy file, version `major`, whose header ends at a multiple of `align` (1: unpadded).
inline std::string NpyBytes(const std::string& dictionary, std::string_view data, int major = 1, size_t align = 64) {
  std::string header = dictionary;
  const size_t fixed = major == 1 ? 10 : 12;
  while ((fixed + header.size() + 1) % align != 0) header += ' ';
  header += '\n';
  std::string out("\x93NUMPY", 6);
  out += static_cast<char>(major);
  out += '\0';
  for (size_t i = 0; i < fixed - 8; ++i) out += static_cast<char>(header.size() >> (8 * i));
  return out + header + std::string(data);
}

}  // namespace hierad
