// Reading takes no more memory in the third epoch than it took in the first.
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "worker/data/loader.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

constexpr char kMake[] = R"(
import os, sys
import numpy as np
from PIL import Image
out = sys.argv[1]
rng = np.random.default_rng(0)
os.mkdir(out + '/images')
for i in range(400):
    image = Image.fromarray(rng.integers(0, 256, (150, 200, 3), dtype=np.uint8)).resize((400, 300))
    image.save(f'{out}/images/{i:03}.' + ('png' if i % 8 == 0 else 'jpg'), quality=90)
np.save(out + '/a.npy', rng.integers(0, 256, (400, 3, 64, 64), dtype=np.uint8))
)";

double ResidentMib() {
  std::ifstream statm("/proc/self/statm");
  double size = 0, resident = 0;
  statm >> size >> resident;
  return resident * double(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

TEST(LoaderMemory, IsFlatOverThreeEpochs) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer keeps what was freed for a while";
  TestFolder folder;
  RunPython(folder, kMake);
  for (const auto& [source, path] : {std::pair{"images", "images"}, std::pair{"npy", "a.npy"}}) {
    v1::JobSpec spec;
    spec.mutable_model()->set_in_chans(3);
    spec.mutable_model()->add_input_size(64), spec.mutable_model()->add_input_size(64);
    spec.mutable_resources()->set_ranks(1);
    spec.mutable_step()->set_batch_per_rank(16);
    spec.mutable_step()->set_accumulation(1);
    spec.mutable_schedule()->set_epochs(3);
    v1::DataSpec& data = *spec.mutable_data();
    data.set_source(source);
    data.set_repeat(1);
    data.set_last_batch("pad");
    data.set_jpeg_scaling(true);
    std::shared_ptr<const Dataset> dataset;
    {
      auto opened = OpenDataset(data, folder.Path(path), InputGeometry(3, {64, 64}), nullptr);
      ASSERT_TRUE(opened.ok()) << opened.status();
      dataset = *std::move(opened);
    }
    Loader::Options options;
    options.spec = spec;
    options.threads = 2;
    auto loader = MakeLoader(dataset, options);
    ASSERT_TRUE(loader.ok()) << loader.status();
    std::vector<double> after;   // each epoch
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (int step = 0; step < 400 / 16; ++step) ASSERT_TRUE((*loader)->Next().ok());
      after.push_back(ResidentMib());
    }
    EXPECT_EQ((*loader)->counters().samples(), 3 * 400);
    // A row that is lost each time would be 37 MiB by then.
    EXPECT_LT(after[2] - after[0], 8) << source << ": resident MiB after each epoch " << after[0] << ", " << after[1] << ", " << after[2];
    RecordProperty(absl::StrCat(source, "_resident_mib"), absl::StrCat(after[0], " ", after[1], " ", after[2]));
  }
}

}  // namespace
}  // namespace hierad
