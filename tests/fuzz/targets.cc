#include "tests/fuzz/targets.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/job_yaml.h"
#include "spdlog/spdlog.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/data/image_pixels.h"
#include "worker/data/npy_file.h"
#include "worker/data/signal_source.h"
#include "worker/data/ts_file.h"

namespace hierad {
namespace {

constexpr int64_t kValues = 1 << 20;   // of one sample that is read: more shows nothing new and takes time

// The input as a file of its own, in memory.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view content) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    if (!fd_ || !WriteAll(fd_.get(), content, "memfd").ok()) std::abort();
    path_ = absl::StrCat("/proc/self/fd/", fd_.get());
  }
  const std::string& path() const { return path_; }

 private:
  UniqueFd fd_;
  std::string path_;
};

void ReadSome(const SignalSource& source) {
  int64_t values = source.channels();
  for (const int64_t axis : source.axes()) values *= axis;
  if (values > kValues) return;
  std::vector<float> x(values);
  for (const int64_t sample : {int64_t{0}, source.count() / 2, source.count() - 1}) {
    (void)source.Read(sample, x.data());
    (void)source.label(sample);
    (void)source.SampleName(sample);
  }
}

void Npy(std::string_view input) {
  const MemoryFile file(input);
  for (const int dims : {1, 2}) {
    const auto source = OpenNpy(file.path(), dims, dims);
    if (source.ok()) ReadSome(**source);
  }
}

void Npz(std::string_view input) {
  const MemoryFile file(input);
  const auto arrays = NpyFile::OpenNpz(file.path());
  if (!arrays.ok()) return;
  for (const auto& [name, array] : *arrays) {
    const NpyHeader& header = array.header();
    if (header.elements == 0 || header.shape.empty() || array.row_elements() > kValues) continue;
    std::vector<float> row(array.row_elements());
    (void)array.ReadRow(header.shape[0] - 1, row.data());
    if (header.elements <= kValues) (void)array.ReadIntegers();
  }
}

void Edf(std::string_view input) {
  const MemoryFile file(input);
  v1::DataSpec data;
  data.set_source("edf");
  data.set_unit("file");
  data.add_channels("EEG Fp1-Ref|Fp1|C3|a");
  data.add_labels("blink");
  Geometry geometry{};
  geometry.input_size = {64};
  geometry.dims = 1;
  geometry.spec.set_in_chans(1);
  for (const bool chain : {false, true}) {
    if (chain) {
      data.set_sample_rate(100);
      data.add_notch(20);
    }
    const auto source = OpenRecordings(data, file.path(), geometry, Subset::kAll);
    if (source.ok()) ReadSome(**source);
  }
}

void Ts(std::string_view input) {
  (void)ParseTs(input, "x.ts");
  TsOptions options;
  options.unequal = TsOptions::Unequal::kEdge;
  options.missing = true;
  (void)ParseTs(input, "x.ts", options);
}

void Image(std::string_view input) {
  DecodeOptions options;
  options.most_pixels = 1 << 18;
  std::vector<uint8_t> out(8 * 8 * 64);
  for (const bool part : {false, true}) {
    if (part) {
      options.channels = 4;
      options.region = [](int height, int width) { return Region{height / 3, width / 3, height - height / 3, width - width / 3}; };
      options.out_height = options.out_width = 8;
    }
    const auto image = DecodeImage(input, options);
    if (image.ok() && image->pixels.channels <= 64) ResizeBox(image->pixels, image->box, 8, 8, out.data());
  }
}

void Safetensors(std::string_view input) {
  const MemoryFile file(input);
  (void)ReadSafetensors(file.path());
}

void JobYaml(std::string_view input) {
  auto spec = ParseJobYaml(input, {});
  if (!spec.ok()) return;
  FillDefaults(&*spec);
  (void)ToJobYaml(*spec);
}

constexpr NamedTarget kTargets[] = {{"npy", Npy},   {"npz", Npz},   {"edf", Edf},     {"ts", Ts},                   {"jpeg", Image},
                                    {"png", Image}, {"webp", Image}, {"tiff", Image}, {"safetensors", Safetensors}, {"job_yaml", JobYaml}};

}  // namespace

std::vector<NamedTarget> FuzzTargets() {
  spdlog::set_level(spdlog::level::off);
  std::vector<NamedTarget> targets(std::begin(kTargets), std::end(kTargets));
  targets.insert(targets.end(), std::begin(kApiTargets), std::end(kApiTargets));
  return targets;
}

FuzzTarget FindFuzzTarget(std::string_view name) {
  for (const NamedTarget& target : FuzzTargets())
    if (name == target.name) return target.run;
  return nullptr;
}

}  // namespace hierad
