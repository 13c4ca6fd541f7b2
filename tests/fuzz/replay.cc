// fuzz_replay --seeds CORPUS writes the API's seeds. fuzz_replay CORPUS: every target over the files of CORPUS/<target>, and over each file cut and with bytes flipped here and there. A
// target without files is a mistake.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/targets.h"

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--seeds") {
    for (const auto& [name, content] : hierad::ApiSeeds()) {
      const std::filesystem::path path = std::filesystem::path(argv[2]) / name;
      std::filesystem::create_directories(path.parent_path());
      std::ofstream(path, std::ios::binary) << content;
    }
    return 0;
  }
  if (argc != 2) return std::fprintf(stderr, "usage: fuzz_replay [--seeds] CORPUS\n"), 2;
  for (const hierad::NamedTarget& target : hierad::FuzzTargets()) {
    std::vector<std::filesystem::path> files;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(argv[1]) / target.name, error)) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    if (files.empty()) return std::fprintf(stderr, "fuzz_replay: no corpus for %s\n", target.name), 1;
    size_t runs = 0;
    for (const auto& path : files) {
      std::ifstream file(path, std::ios::binary);
      const std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      std::fprintf(stderr, "%s %s\n", target.name, path.filename().c_str());   // the last line names what crashed
      target.run(content);
      const size_t step = 1 + content.size() / 24;
      for (size_t at = 0; at < content.size(); at += step, runs += 2) {
        target.run(std::string_view(content).substr(0, at));
        std::string flipped = content;
        flipped[at] = static_cast<char>(flipped[at] ^ 0xFF);
        target.run(flipped);
      }
    }
    std::printf("%s: %zu files, %zu runs\n", target.name, files.size(), runs + files.size());
  }
}
