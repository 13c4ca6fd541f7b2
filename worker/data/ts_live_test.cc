// Files that aeon writes, read as aeon reads them.
#include <cmath>
#include <sstream>

#include "base/fs.h"
#include "gtest/gtest.h"
#include "worker/data/test_files.h"
#include "worker/data/ts_file.h"

namespace hierad {
namespace {

// Writes each collection, and what aeon reads back: count, channels, length, then values and labels as text.
constexpr char kAeon[] = R"(
import sys
import numpy as np
from aeon.datasets import load_from_ts_file, save_to_ts_file
out = sys.argv[1]
seed = int.from_bytes(np.random.bytes(4), 'little')
rng = np.random.default_rng(seed)
several = rng.normal(0, 1e3, (7, 3, 40)) * 10.0 ** rng.integers(-9, 9, (7, 3, 40))
one = rng.normal(0, 1, (5, 1, 30)).astype(np.float32)
holes = rng.normal(0, 1, (6, 2, 25))
holes[rng.random(holes.shape) < 0.2] = np.nan
classes = np.array(['left', 'right', 'rest', 'left', 'left', 'rest', 'right'])
unequal = [rng.normal(0, 1, (2, n)) for n in (9, 30, 17, 30)]
cases = {'several': (several, classes), 'one': (one, np.array(['1', '2', '1', '2', '2'])), 'holes': (holes, classes[:6]),
         'unequal': (unequal, classes[:4]), 'bare': (several, None)}
for name, (x, y) in cases.items():
    save_to_ts_file(x, y, label_type=None if y is None else 'classification', path=out, problem_name=name, header='made for the test')
    read = load_from_ts_file(f'{out}/{name}.ts', return_meta_data=False)
    series, labels = read if isinstance(read, tuple) else (read, None)
    length = max(s.shape[1] for s in series)
    with open(f'{out}/{name}.read', 'w') as file:
        print(len(series), series[0].shape[0], length, file=file)
        for i, s in enumerate(series):
            padded = np.zeros((s.shape[0], length))
            padded[:, :s.shape[1]] = s
            print(*(repr(float(v)) for v in padded.astype(np.float32).ravel()), '-' if y is None else labels[i], file=file)
print(seed)
)";

TEST(TsLive, EqualsAeon) {
  TestFolder folder;
  SCOPED_TRACE("seed " + RunPython(folder, kAeon));
  for (const std::string name : {"several", "one", "holes", "unequal", "bare"}) {
    SCOPED_TRACE(name);
    const auto text = ReadFile(folder.Path(name + ".ts"), 1 << 20);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(ParseTs(*text, name).ok(), name != "holes" && name != "unequal") << "what is missing or unequal is read on request";
    TsOptions options;
    options.missing = true;
    options.unequal = TsOptions::Unequal::kZero;
    const auto file = ParseTs(*text, name, options);
    ASSERT_TRUE(file.ok()) << file.status();
    std::istringstream read(*ReadFile(folder.Path(name + ".read"), 1 << 20));
    int64_t count = 0, channels = 0, length = 0;
    read >> count >> channels >> length;
    ASSERT_EQ(file->count, count);
    ASSERT_EQ(file->channels, channels);
    ASSERT_EQ(file->length, length);
    std::string word;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t k = 0; k < channels * length; ++k) {
        read >> word;
        const float value = file->values[i * channels * length + k];
        if (word == "nan") EXPECT_TRUE(std::isnan(value)) << i << " " << k;
        else ASSERT_EQ(value, float(std::stod(word))) << i << " " << k;
      }
      read >> word;
      EXPECT_EQ(file->labels.empty() ? "-" : file->class_names[file->labels[i]], word) << i;
    }
  }
}

}  // namespace
}  // namespace hierad
