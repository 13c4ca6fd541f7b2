// Recordings written by edfio, read by MNE and by us.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/signal_source.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

std::vector<float> Floats(const std::string& path) {
  const auto bytes = ReadFile(path, 1 << 28);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  std::vector<float> values(bytes.ok() ? bytes->size() / 4 : 0);
  if (bytes.ok()) std::memcpy(values.data(), bytes->data(), values.size() * 4);
  return values;
}

// MNE's own samples in uV, its annotations, and the same through scipy's filters, as [channels, samples].
constexpr char kMake[] = R"(
import sys
import numpy as np, mne, edfio
from scipy.signal import firwin
out = sys.argv[1]
seed = int.from_bytes(np.random.bytes(4), 'little')
print(seed)
rng = np.random.default_rng(seed)
mne.set_log_level('error')
names = ['EEG Fp1-Ref', 'EEG C3-Ref', 'EEG O1-Ref']
for kind, Format, Signal in (('edf', edfio.Edf, edfio.EdfSignal), ('bdf', edfio.Bdf, edfio.BdfSignal)):
    rate, seconds = 200, 60
    t = np.arange(rate * seconds) / rate
    data = [50 * np.sin(2 * np.pi * (5 + 7 * c) * t) + rng.normal(0, 30, t.size) + 15 * c for c in range(3)]
    marks = [edfio.EdfAnnotation(onset=10.25, duration=3, text='rest'), edfio.EdfAnnotation(onset=30, duration=None, text='d\u00e9but')]
    Format([Signal(d, rate, label=n, physical_dimension='uV') for d, n in zip(data, names)], annotations=marks).write(f'{out}/a.{kind}')
    read = mne.io.read_raw_edf if kind == 'edf' else mne.io.read_raw_bdf
    raw = read(f'{out}/a.{kind}', preload=True)
    assert [a['description'] for a in raw.annotations] == ['rest', 'd\u00e9but'], raw.annotations
    (raw.get_data() * 1e6).astype(np.float32).tofile(f'{out}/{kind}.raw')
    filtered = raw.copy().filter(1, 40).get_data() * 1e6
    filtered.astype(np.float32).tofile(f'{out}/{kind}.filtered')
    filtered = raw.copy().notch_filter(50).get_data() * 1e6
    filtered.astype(np.float32).tofile(f'{out}/{kind}.notched')
    # Our design, in double precision: high-pass 1 Hz and low-pass 40 Hz, with MNE's lengths.
    high = int(np.ceil(3.3 / 1 * rate)) | 1
    low = int(np.ceil(3.3 / 10 * rate)) | 1
    hp = -firwin(high, 0.5, fs=rate, window='hamming'); hp[high // 2] += 1
    taps = np.convolve(hp, firwin(low, 45, fs=rate, window='hamming'))
    half = taps.size // 2
    x = raw.get_data() * 1e6
    wide = np.concatenate([2 * x[:, :1] - x[:, half:0:-1], x, 2 * x[:, -1:] - x[:, -2:-half - 2:-1]], axis=1)
    np.stack([np.convolve(w, taps, 'valid') for w in wide]).astype(np.float32).tofile(f'{out}/{kind}.scipy')
)";

TEST(EdfLive, EqualsMne) {
  TestFolder folder;
  const std::string seed = RunPython(folder, kMake);
  SCOPED_TRACE("seed " + seed);
  constexpr int64_t kRate = 200, kTotal = 60 * kRate, kPoints = 3 * kRate;
  for (const std::string kind : {"edf", "bdf"}) {
    v1::DataSpec data;
    data.set_source("edf");
    for (const char* name : {"O1", "fp1"}) data.add_channels(name);
    data.add_labels("d\xC3\xA9" "but"), data.add_labels("rest");
    const int channels[] = {2, 0};
    // Differences to `expected` over all windows but the first and last `skip_windows`.
    struct Difference {
      double largest = 1e9, rms = 1e9;
    };
    const auto difference = [&](const std::string& expected_name, int64_t skip_windows) {
      const std::vector<float> expected = Floats(folder.Path(kind + "." + expected_name));
      const auto source = OpenRecordings(data, folder.Path("a." + kind), InputGeometry(2, {kPoints}), Subset::kAll);
      EXPECT_TRUE(source.ok()) << source.status();
      if (!source.ok() || expected.size() != 3 * kTotal) return Difference{};
      EXPECT_EQ((*source)->count(), kTotal / kPoints);
      EXPECT_EQ((*source)->label(0), -1);
      EXPECT_EQ((*source)->label(3), 1);    // 9 to 12 s, of 10.25 to 13.25
      EXPECT_EQ((*source)->label(4), 1);
      EXPECT_EQ((*source)->label(10), 0);   // 30 s
      double largest = 0, squares = 0;
      int64_t values = 0;
      for (int64_t w = skip_windows; w < (*source)->count() - skip_windows; ++w) {
        std::vector<float> x(2 * kPoints);
        EXPECT_TRUE((*source)->Read(w, x.data()).ok());
        for (int64_t c = 0; c < 2; ++c)
          for (int64_t t = 0; t < kPoints; ++t, ++values) {
            const double d = std::abs(x[c * kPoints + t] - expected[channels[c] * kTotal + w * kPoints + t]);
            largest = std::max(largest, d);
            squares += d * d;
          }
      }
      return Difference{largest, std::sqrt(squares / double(values))};
    };
    EXPECT_LT(difference("raw", 0).largest, 2e-5) << kind;           // of +-200 uV in fp32
    data.add_band_pass(1), data.add_band_pass(40);
    EXPECT_LT(difference("scipy", 0).largest, 2e-3) << kind;         // edges included; sums of 727 products in fp32
    // MNE's filters are others of the same bands, so of a noise of 30 uV (3 uV in each hertz) what lies where they differ is left:
    // its rms is the same for every seed, its extremes are not.
    EXPECT_LT(difference("filtered", 2).rms, 5e-3) << kind;  // both edges in one filter: other ripple
    data.clear_band_pass();
    data.add_notch(50);
    EXPECT_LT(difference("notched", 2).rms, 2) << kind;      // narrower by a hertz
  }
}

// Sleep-EDF's way: recordings, and hypnograms in files of their own. "labels": of each window of 30 s, in the order of the files, the
// number of its stage by MNE's reading of the hypnogram.
constexpr char kMakeSleep[] = R"(
import os, sys, datetime
import numpy as np, mne, edfio
out = sys.argv[1]
seed = int.from_bytes(np.random.bytes(4), 'little')
print(seed)
rng = np.random.default_rng(seed)
mne.set_log_level('error')
stages = ['Sleep stage W', 'Sleep stage 1', 'Sleep stage 2', 'Sleep stage R']
def write(path, signals, start, marks=()):
    edfio.Edf(signals, recording=edfio.Recording(startdate=datetime.date(1989, 4, 24)), starttime=datetime.time(16, start), annotations=marks).write(path)
def recording(path, start):
    write(path, [edfio.EdfSignal(rng.normal(0, 30, 100 * 600), 100, label='EEG Fpz-Cz', physical_dimension='uV')], start)
labels = []
os.mkdir(out + '/sleep'); os.mkdir(out + '/alike')
for name, start in (('SC4001E', 13), ('SC4002E', 13), ('SC4011E', 40)):
    recording(f'{out}/sleep/{name}0-PSG.edf', start)
    if start == 40:   # not scored
        labels += [-1] * 20
        continue
    cuts = [0, *sorted(rng.choice(np.arange(1, 20), 6, replace=False).tolist()), 20]
    names = rng.choice(stages + ['Sleep stage ?'], 7)
    marks = [edfio.EdfAnnotation(onset=30 * a, duration=30 * (b - a), text=str(n)) for a, b, n in zip(cuts, cuts[1:], names)]
    write(f'{out}/sleep/{name}C-Hypnogram.edf', [], start, marks)
    read = mne.read_annotations(f'{out}/sleep/{name}C-Hypnogram.edf')
    for w in range(20):
        here = [a['description'] for a in read if a['onset'] <= 30 * w + 15 < a['onset'] + a['duration']]
        assert len(here) == 1, here
        labels.append(stages.index(here[0]) if here[0] in stages else -1)
write(out + '/sleep/SC4012EC-Hypnogram.edf', [], 55, [edfio.EdfAnnotation(onset=0, duration=30, text=stages[0])])
np.array(labels, np.int32).tofile(out + '/labels')
for name in ('a1', 'a2'): recording(f'{out}/alike/{name}.edf', 13)
write(out + '/alike/a-marks.edf', [], 13, [edfio.EdfAnnotation(onset=0, duration=30, text=stages[0])])
)";

TEST(EdfLive, HypnogramsBesideTheirRecordings) {
  TestFolder folder;
  SCOPED_TRACE("seed " + RunPython(folder, kMakeSleep));
  const auto bytes = ReadFile(folder.Path("labels"), 1 << 20);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  std::vector<int32_t> expected(bytes->size() / 4);
  std::memcpy(expected.data(), bytes->data(), bytes->size());
  v1::DataSpec data;
  data.set_source("edf");
  for (const char* stage : {"W", "1", "2", "R"}) data.add_labels(absl::StrCat("Sleep stage ", stage));
  const Geometry geometry = InputGeometry(1, {3000});
  const auto labels = [&](Subset subset) {
    const auto source = OpenRecordings(data, folder.Path("sleep"), geometry, subset);
    EXPECT_TRUE(source.ok()) << source.status();
    std::vector<int32_t> found;
    for (int64_t w = 0; source.ok() && w < (*source)->count(); ++w) found.push_back(static_cast<int32_t>((*source)->label(w)));
    return found;
  };
  EXPECT_EQ(labels(Subset::kAll), expected);
  EXPECT_THAT((*OpenRecordings(data, folder.Path("sleep"), geometry, Subset::kAll))->Describe(),
              testing::HasSubstr("3 recordings, 2 annotation files joined to them (and 1 with annotations only, which belong to none, left alone)"));
  // A hypnogram goes where its recording goes, and is no subject.
  data.set_held_out(0.34);
  const std::vector<int32_t> held = labels(Subset::kHeldOut), kept = labels(Subset::kTraining);
  EXPECT_EQ(held.size(), 20u);
  EXPECT_EQ(kept.size(), 40u);
  std::vector<int32_t> both = held, all = expected;
  both.insert(both.end(), kept.begin(), kept.end());
  std::sort(both.begin(), both.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(both, all);
  data.clear_held_out();
  const auto alike = OpenRecordings(data, folder.Path("alike"), geometry, Subset::kAll);
  EXPECT_THAT(std::string(alike.status().message()), testing::HasSubstr("a-marks.edf fit a1.edf and a2.edf, which begin at the same time and are named alike"));
}

}  // namespace
}  // namespace hierad
