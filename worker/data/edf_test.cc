#include <sys/resource.h>

#include <cmath>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/edf_file.h"
#include "worker/data/edf_test_files.h"
#include "worker/data/signal_source.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

v1::DataSpec Edf() {
  v1::DataSpec data;
  data.set_source("edf");
  return data;
}

std::unique_ptr<SignalSource> Opened(const std::string& path, int chans, int64_t points, const v1::DataSpec& data = Edf(), Subset subset = Subset::kAll) {
  auto source = OpenRecordings(data, path, InputGeometry(chans, {points}), subset);
  EXPECT_TRUE(source.ok()) << source.status();
  return source.ok() ? *std::move(source) : nullptr;
}

std::string Refusal(const std::string& path, int chans, int64_t points, const v1::DataSpec& data = Edf()) {
  const auto source = OpenRecordings(data, path, InputGeometry(chans, {points}), Subset::kAll);
  EXPECT_FALSE(source.ok());
  return source.ok() ? "" : std::string(source.status().message());
}

std::vector<float> Window(const SignalSource& source, uint64_t sample) {
  std::vector<float> x(source.channels() * source.axes()[0]);
  const absl::Status status = source.Read(sample, x.data());
  EXPECT_TRUE(status.ok()) << status;
  return x;
}

// What TestRecording's default signals hold.
float Expected(int signal, int64_t sample) { return float(0.1 * ((sample * 7 + signal * 1000) % 20011 - 10000)); }

// Field report: samples per record were taken as the rate, and odd record lengths broke.
TEST(Edf, RatesAndWindowsOfOddRecords) {
  TestFolder folder;
  struct Case { const char* duration; int64_t samples; double rate; };
  for (const Case& c : {Case{"2", 512, 256}, Case{"0.9999", 250, 250.02500250025}, Case{"1.137", 1137, 1000}, Case{"1", 256, 256}}) {
    TestRecording recording;
    recording.duration = c.duration;
    recording.signals[0].samples = c.samples;
    const std::string path = folder.Write("a.edf", recording.Bytes());
    const auto file = EdfFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_NEAR(file->header().rate(file->header().signals[0]), c.rate, 1e-9);
    const auto source = Opened(path, 1, 300);
    ASSERT_EQ(source->count(), 10 * c.samples / 300);
    for (int64_t w = 0; w < source->count(); ++w) {
      const std::vector<float> x = Window(*source, w);
      for (int64_t t = 0; t < 300; ++t) ASSERT_NEAR(x[t], Expected(0, w * 300 + t), 1e-3) << c.duration << " " << w << " " << t;
    }
  }
}

TEST(Edf, DurationZero) {
  TestFolder folder;
  TestRecording only_text;
  only_text.duration = "0";
  only_text.signals.clear();
  only_text.reserved = "EDF+C";
  only_text.annotations = {std::string("+0\x14\x14\0+1.5\x15" "2\x14stage 2\x14\0", 21)};
  const auto file = EdfFile::Open(folder.Write("a.edf", only_text.Bytes()));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->annotations().size(), 10u);
  EXPECT_EQ(file->annotations()[0].text, "stage 2");
  EXPECT_THAT(Refusal(folder.Path("a.edf"), 1, 100), HasSubstr("annotations only"));
  TestRecording signal;
  signal.duration = "0";
  EXPECT_THAT(Refusal(folder.Write("b.edf", signal.Bytes()), 1, 100), testing::AllOf(HasSubstr("b.edf"), HasSubstr("records last 0 s")));
}

// Field report: -1 records, fewer or more than announced; EDF and BDF differ in their sample's width.
TEST(Edf, RecordCountComesFromTheFile) {
  TestFolder folder;
  for (const bool bdf : {false, true}) {
    for (const std::string announced : {"-1", "10", "12", "0", "99999999", "many"}) {
      for (const int64_t extra : {int64_t{0}, int64_t{101}}) {
        TestRecording recording;
        recording.bdf = bdf;
        recording.announced = announced;
        const std::string path = folder.Write("a.edf", recording.Bytes() + std::string(extra, 'x'));
        const auto file = EdfFile::Open(path);
        ASSERT_TRUE(file.ok()) << file.status();
        EXPECT_EQ(file->header().records, 10);
        if (announced == "10" && extra == 0) {
          EXPECT_TRUE(file->header().warnings.empty());
        } else {
          ASSERT_EQ(file->header().warnings.size(), 1u);
          EXPECT_THAT(file->header().warnings[0], testing::AllOf(HasSubstr(announced), HasSubstr("the file holds 10")));
        }
        const auto source = Opened(path, 1, 256);
        ASSERT_EQ(source->count(), 10);
        EXPECT_NEAR(Window(*source, 9)[255], Expected(0, 2559), 1e-3);
      }
    }
    TestRecording recording;
    recording.bdf = bdf;
    const std::string whole = recording.Bytes();
    const int64_t header = 512, record = 256 * (bdf ? 3 : 2);
    const std::string cut = folder.Write("cut.edf", whole.substr(0, header + 7 * record + record / 3));
    EXPECT_EQ(EdfFile::Open(cut)->header().records, 7);
    EXPECT_THAT(Refusal(folder.Write("none.edf", whole.substr(0, header + record - 1)), 1, 256), HasSubstr("0 whole records"));
  }
}

TEST(Edf, EveryCutAndFlippedByteOfTheHeaderIsRefusedOrRead) {
  TestFolder folder;
  TestRecording recording;
  recording.records = 2;
  recording.signals.push_back(TestSignal{"C3", "uV", 128});
  recording.reserved = "EDF+D";
  recording.annotations = {std::string("+0\x14\x14\0", 5), std::string("+1\x14\x14\0", 5)};
  const std::string whole = recording.Bytes();
  for (size_t size = 0; size <= 1024; size += 3) {
    const auto file = EdfFile::Open(folder.Write("cut.edf", whole.substr(0, size)));
    ASSERT_FALSE(file.ok()) << size;
    EXPECT_EQ(ReasonOf(file.status()), v1::REASON_DATA_ERROR);
    EXPECT_THAT(std::string(file.status().message()), HasSubstr("cut.edf"));
  }
  v1::DataSpec data = Edf();
  data.add_channels("C3");
  for (size_t at = 0; at < 1024; ++at) {
    for (const char c : {at % 2 ? '9' : '-', at % 5 ? '\xFF' : '\0'}) {
      if (at % 4 != 0 && c != '9') continue;
      std::string damaged = whole;
      damaged[at] = c;
      const auto source = OpenRecordings(data, folder.Write("damaged.edf", damaged), InputGeometry(1, {64}), Subset::kAll);
      if (!source.ok()) continue;
      std::vector<float> x(64);
      (void)(*source)->Read((*source)->count() - 1, x.data());
    }
  }
}

// Field report: gaps were closed, labels after them landed on other samples.
TEST(Edf, NoWindowCrossesAGapAndLabelsKeepTheirTime) {
  TestFolder folder;
  TestRecording recording;
  recording.records = 5;
  recording.reserved = "EDF+D";
  for (const char* onset : {"0", "1", "2", "60", "61"}) {
    recording.annotations.push_back(absl::StrCat("+", onset, "\x14\x14", std::string(1, '\0')));
  }
  recording.annotations[4] += "+60.5\x14" "blink\x14";
  v1::DataSpec data = Edf();
  data.set_window_s(2);
  data.set_stride_s(1);
  data.add_labels("blink");
  data.add_channels("fp1");
  const std::string path = folder.Write("a.edf", recording.Bytes());
  const auto source = Opened(path, 1, 512, data);
  ASSERT_EQ(source->count(), 3);
  EXPECT_NEAR(Window(*source, 2)[0], Expected(0, 3 * 256), 1e-3);
  EXPECT_EQ(source->label(0), -1);
  EXPECT_EQ(source->label(1), -1);
  EXPECT_EQ(source->label(2), 0);
  EXPECT_THAT(source->SampleName(2), HasSubstr("60.0000 to 62.0000 s"));
  data.set_window_s(1);
  const auto seconds = Opened(path, 1, 256, data);
  ASSERT_EQ(seconds->count(), 5);
  EXPECT_THAT((std::vector<int64_t>{seconds->label(2), seconds->label(3), seconds->label(4)}), ElementsAre(-1, 0, -1));

  // Onsets of 0.5 s and no gap: the same windows as a file without interruption.
  recording.annotations.clear();
  for (const char* onset : {"0.5", "1.5", "2.5", "3.5", "4.5"}) recording.annotations.push_back(absl::StrCat("+", onset, "\x14\x14", std::string(1, '\0')));
  const auto whole = Opened(folder.Write("b.edf", recording.Bytes()), 1, 300, Edf());
  recording.reserved = "EDF+C";
  const auto twin = Opened(folder.Write("c.edf", recording.Bytes()), 1, 300, Edf());
  ASSERT_EQ(whole->count(), 4);
  ASSERT_EQ(twin->count(), 4);
  for (int w = 0; w < 4; ++w) EXPECT_EQ(Window(*whole, w), Window(*twin, w));
  recording.reserved = "EDF+D";
  recording.annotations[3] = "";
  EXPECT_THAT(Refusal(folder.Write("d.edf", recording.Bytes()), 1, 300), HasSubstr("record 3 at byte 2544 has no time stamp"));
}

// Field report: accents, colons and odd bytes stopped the read of good samples.
TEST(Edf, TextThatNothingDependsOnNeverStopsARead) {
  TestFolder folder;
  TestRecording recording;
  recording.start_time = "09:01:17";
  recording.start_date = "00.00.00";
  recording.patient = "\xC7" "elik \xFF\x01";
  recording.signals = {{"Posi\xE7\xE3o", "\xB5V"}, {"EEG Fp1-Ref"}};
  recording.reserved = "EDF+C";
  recording.annotations = {std::string("+0\x14\x14\0+3\x15" "1\x14" "\xC8 caf\xE9\x14\0", 18)};
  for (const std::string name : {"Çelik/été 1.edf", "line\nbreak.edf", "byte\xFF.edf"}) {
    v1::DataSpec data = Edf();
    data.add_channels("Posição");
    data.add_labels("È café");
    const auto source = Opened(folder.Write(name, recording.Bytes()), 1, 256, data);
    ASSERT_NE(source, nullptr);
    EXPECT_NEAR(Window(*source, 3)[7], Expected(0, 3 * 256 + 7), 1e-3);
    EXPECT_EQ(source->label(3), 0);
    EXPECT_EQ(source->label(4), -1);
    EXPECT_TRUE(IsUtf8(source->SampleName(1)) && source->SampleName(1).find('\n') == std::string::npos);
  }
}

// Field report: offsets of 32 bits wrapped. 4.3 GiB with 1 GiB of memory.
TEST(Edf, LargeSparseFileWithLittleMemory) {
  if (kSanitized) GTEST_SKIP() << "under a sanitizer";
  TestFolder folder;
  TestRecording recording;
  recording.bdf = true;
  recording.signals.assign(64, TestSignal{"", "uV", 2048});
  for (int i = 0; i < 64; ++i) recording.signals[i].label = absl::StrCat("E", i);
  recording.announced = "-1";
  const int64_t record_bytes = 64 * 2048 * 3, records = (int64_t{43} << 30) / 10 / record_bytes;
  const std::string path = folder.Write("big.bdf", recording.Header());
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(65 * 256 + (records - 1) * record_bytes);
    file << recording.Record(records - 1);
  }
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  const rlimit low{1 << 30, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &low), 0);
  const auto source = OpenRecordings(Edf(), path, InputGeometry(64, {2048}), Subset::kAll);
  std::vector<float> x(64 * 2048);
  const absl::Status read = source.ok() ? (*source)->Read((*source)->count() - 1, x.data()) : source.status();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  ASSERT_TRUE(read.ok()) << read;
  ASSERT_EQ((*source)->count(), records);
  for (int c = 0; c < 64; ++c)
    for (int t = 0; t < 2048; ++t) ASSERT_NEAR(x[c * 2048 + t], Expected(c, (records - 1) * 2048 + t), 1e-3) << c << " " << t;
}

TEST(Edf, ChannelsByNameInTheAskedOrder) {
  TestFolder folder;
  TestRecording recording;
  recording.signals = {{"EEG Fp1-Ref"}, {"C3.."}, {"Fp1-F7"}, {"EEG T3-LE"}, {"ECG"}, {"Status", ""}};
  const std::string path = folder.Write("a.edf", recording.Bytes());
  v1::DataSpec data = Edf();
  for (const char* name : {"t7|T3", "FP1", "c3", "Fp1-F7"}) data.add_channels(name);
  const auto source = Opened(path, 4, 256, data);
  const std::vector<float> x = Window(*source, 1);
  const int signals[] = {3, 0, 1, 2};
  for (int c = 0; c < 4; ++c) EXPECT_NEAR(x[c * 256 + 5], Expected(signals[c], 256 + 5), 1e-3) << c;
  data.clear_channels();
  EXPECT_THAT(Refusal(path, 4, 256, data), testing::AllOf(HasSubstr("has 6 signals, model.in_chans is 4"), HasSubstr("Fp1-F7")));
  data.add_channels("Cz");
  EXPECT_THAT(Refusal(path, 1, 256, data), testing::AllOf(HasSubstr("no channel 'Cz'"), HasSubstr("EEG Fp1-Ref, C3..")));
  data.set_channels(0, "Status");
  EXPECT_THAT(Refusal(path, 1, 256, data), HasSubstr("no voltage; set data.unit: file"));
  recording.signals.push_back({"Fp1-AVG"});
  data.set_channels(0, "Fp1");
  EXPECT_THAT(Refusal(folder.Write("b.edf", recording.Bytes()), 1, 256, data), HasSubstr("may be 'EEG Fp1-Ref' (signal 0) and 'Fp1-AVG' (signal 6)"));
}

TEST(Edf, UnitsAndScales) {
  TestFolder folder;
  TestRecording recording;
  recording.signals = {{"a", "mV"}, {"b", "V"}, {"c", "\xB5V"}, {"d", "uV", 256, "1", "1"}, {"e", "uV", 256, "-1", "x"}};
  const std::string path = folder.Write("a.edf", recording.Bytes());
  v1::DataSpec data = Edf();
  for (const char* name : {"a", "b", "c"}) data.add_channels(name);
  const std::vector<float> x = Window(*Opened(path, 3, 256, data), 0);
  const float factors[] = {1e3f, 1e6f, 1};
  for (int c = 0; c < 3; ++c) EXPECT_NEAR(x[c * 256 + 9] / factors[c], Expected(c, 9), 1e-2) << c;
  data.set_unit("file");
  EXPECT_NEAR(Window(*Opened(path, 3, 256, data), 0)[9], Expected(0, 9), 1e-3);
  data.clear_channels();
  data.add_channels("d");
  EXPECT_THAT(Refusal(path, 1, 256, data), HasSubstr("physical minimum and maximum are both 1"));
  data.set_channels(0, "e");
  EXPECT_THAT(Refusal(path, 1, 256, data), HasSubstr("its physical maximum is 'x', not a number"));
}

TEST(Edf, SubjectsAreHeldOutTheSameEachTime) {
  TestFolder folder;
  TestRecording recording;
  recording.records = 2;
  for (int i = 0; i < 20; ++i) folder.Write(absl::StrCat("s", i / 2, "/run", i % 2, ".edf"), recording.Bytes());
  folder.Write("README", "x");
  v1::DataSpec data = Edf();
  data.set_held_out(0.3);
  data.set_subject("folder");
  const auto training = Opened(folder.Path(""), 1, 256, data, Subset::kTraining), held_out = Opened(folder.Path(""), 1, 256, data, Subset::kHeldOut);
  EXPECT_EQ(training->count(), 28);
  EXPECT_EQ(held_out->count(), 12);
  const auto subjects = [](const SignalSource& source) {
    std::set<std::string> names;
    for (int64_t i = 0; i < source.count(); ++i) {
      const std::string name = source.SampleName(i);
      names.insert(name.substr(name.find("/s") + 1, name.find("/run") - name.find("/s")));
    }
    return names;
  };
  for (const std::string& name : subjects(*held_out)) EXPECT_FALSE(subjects(*training).contains(name)) << name;
  EXPECT_THAT(training->Describe(), HasSubstr("3 of 10 subjects held out"));
  data.set_subject("file");
  EXPECT_EQ(Opened(folder.Path(""), 1, 256, data, Subset::kHeldOut)->count(), 12);
  EXPECT_THAT(Refusal(folder.Path("s1/run0.edf"), 1, 256, data), HasSubstr("needs a folder of recordings"));
}

TEST(Edf, RatesThatDifferAreRefusedOrResampled) {
  TestFolder folder;
  TestRecording recording;
  recording.signals = {{"a"}, {"b", "uV", 100}};
  const std::string path = folder.Write("a.edf", recording.Bytes());
  EXPECT_THAT(Refusal(path, 2, 256), HasSubstr("has 100 Hz, others 256; set data.sample_rate"));
  v1::DataSpec data = Edf();
  data.set_sample_rate(128);
  const auto source = Opened(path, 2, 128, data);
  EXPECT_EQ(source->count(), 10);
  EXPECT_THAT(Refusal(path, 2, 256 * 20, data), HasSubstr("0 windows"));
}

// A sine keeps its phase through resampling, filters keep the pass band and take the rest out, and a window is the same
// whether it is the first read or not.
TEST(Edf, FiltersAndResamplingOnSines) {
  TestFolder folder;
  TestRecording recording;
  recording.records = 60;
  recording.signals[0].samples = 250;
  const auto sines = [](double t) { return 1000 * std::sin(2 * M_PI * 10 * t) + 700 * std::sin(2 * M_PI * 50 * t + 1) + 1500; };
  recording.value = [&](int, int64_t sample) { return int32_t(std::lround(10 * sines(double(sample) / 250))); };
  const std::string path = folder.Write("a.edf", recording.Bytes());
  v1::DataSpec data = Edf();
  data.add_band_pass(1), data.add_band_pass(0);
  data.add_notch(50);
  for (const double rate : {250.0, 128.0, 333.3, 512.0}) {
    data.set_sample_rate(rate);
    data.set_window_s(2);
    const auto source = Opened(path, 1, 100, data);
    for (const int64_t w : {5, 20}) {
      const std::vector<float> x = Window(*source, w);
      const int64_t points = x.size();
      double worst = 0;
      for (int64_t t = 0; t < points; ++t) worst = std::max(worst, std::abs(x[t] - 1000 * std::sin(2 * M_PI * 10 * double(w * points + t) / rate)));
      EXPECT_LT(worst, 6) << rate << " " << w;   // Hamming: 0.2% ripple; a digit of 0.1
    }
  }
  data.clear_band_pass();
  data.add_band_pass(0), data.add_band_pass(130);
  EXPECT_THAT(Refusal(path, 1, 100, data), testing::AllOf(HasSubstr("a.edf"), HasSubstr("data.band_pass: upper edge 130"), HasSubstr("below 125")));
}

// A record of 2 us makes a rate of 128 MHz, and a notch a filter of gigabytes.
TEST(Edf, ARateThatNoFilterFitsIsRefused) {
  TestFolder folder;
  TestRecording recording;
  recording.duration = "0.000002";
  v1::DataSpec data = Edf();
  data.add_notch(50);
  EXPECT_THAT(Refusal(folder.Write("a.edf", recording.Bytes()), 1, 100, data), testing::AllOf(HasSubstr("a.edf"), HasSubstr("data.notch: 50"), HasSubstr("points")));
}

TEST(Edf, AnAnnotationOfAnyLengthCoversTheWindowsInIt) {
  TestFolder folder;
  TestRecording recording;
  recording.records = 3;
  recording.reserved = "EDF+C";
  for (const char* onset : {"0", "1", "2"}) recording.annotations.push_back(absl::StrCat("+", onset, "\x14\x14", std::string(1, '\0')));
  recording.annotations[1] += "+1\x15" "1e300\x14" "blink\x14";
  recording.annotations[2] += "+1e300\x14" "late\x14";
  v1::DataSpec data = Edf();
  data.add_labels("blink");
  data.add_labels("late");
  const auto source = Opened(folder.Write("a.edf", recording.Bytes()), 1, 256, data);
  ASSERT_EQ(source->count(), 3);
  EXPECT_THAT((std::vector<int64_t>{source->label(0), source->label(1), source->label(2)}), ElementsAre(-1, 0, 0));
}

TEST(Edf, ACutWhileInUseIsAnError) {
  TestFolder folder;
  const std::string path = folder.Write("a.edf", TestRecording().Bytes());
  const auto source = Opened(path, 1, 256);
  std::filesystem::resize_file(path, 512 + 9 * 512 + 100);
  std::vector<float> x(256);
  EXPECT_TRUE(source->Read(8, x.data()).ok());
  const absl::Status status = source->Read(9, x.data());
  EXPECT_EQ(ReasonOf(status), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cut while in use"));
}

}  // namespace
}  // namespace hierad
