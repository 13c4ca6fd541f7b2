// EDF and BDF recordings made for tests, any of their numbers wrong on request.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace hierad {

struct TestSignal {
  std::string label = "EEG Fp1-Ref", unit = "uV";
  int64_t samples = 256;                         // in a record
  std::string physical_min = "-3276.8", physical_max = "3276.7", digital_min = "-32768", digital_max = "32767";   // 0.1 a step
};

struct TestRecording {
  bool bdf = false;
  std::string reserved;                          // "EDF+C", "EDF+D", ...
  std::string duration = "1", announced, start_date = "01.02.03", start_time = "04.05.06", patient = "X";   // announced: empty: as it is
  int64_t records = 10;
  std::vector<TestSignal> signals = {TestSignal{}};
  // Digital value of a sample counted over the records; default: a sawtooth of its own for each signal.
  std::function<int32_t(int signal, int64_t sample)> value = [](int signal, int64_t sample) { return int32_t((sample * 7 + signal * 1000) % 20011 - 10000); };
  // With a signal of 40 samples (80 or 120 bytes) of annotations at the end: text of each record, with \x14 and \x15.
  std::vector<std::string> annotations;

  std::string Header() const {
    std::vector<TestSignal> all = signals;
    if (!annotations.empty()) all.push_back({bdf ? "BDF Annotations" : "EDF Annotations", "", 40, "-1", "1", "-32768", "32767"});
    const auto field = [](std::string text, size_t width) {
      text.resize(width, ' ');
      return text;
    };
    std::string out = field(bdf ? "\xFF" "BIOSEMI" : "0", 8) + field(patient, 80) + field("recording", 80) + field(start_date, 8) + field(start_time, 8) +
                      field(absl::StrCat(256 * (all.size() + 1)), 8) + field(reserved, 44) + field(announced.empty() ? absl::StrCat(records) : announced, 8) +
                      field(duration, 8) + field(absl::StrCat(all.size()), 4);
    for (const TestSignal& s : all) out += field(s.label, 16);
    for (size_t i = 0; i < all.size(); ++i) out += field("AgAgCl", 80);
    for (const TestSignal& s : all) out += field(s.unit, 8);
    for (const TestSignal& s : all) out += field(s.physical_min, 8);
    for (const TestSignal& s : all) out += field(s.physical_max, 8);
    for (const TestSignal& s : all) out += field(s.digital_min, 8);
    for (const TestSignal& s : all) out += field(s.digital_max, 8);
    for (size_t i = 0; i < all.size(); ++i) out += field("HP:0.1Hz", 80);
    for (const TestSignal& s : all) out += field(absl::StrCat(s.samples), 8);
    for (size_t i = 0; i < all.size(); ++i) out += field("", 32);
    return out;
  }
  std::string Record(int64_t record) const {
    std::string out;
    const int bytes = bdf ? 3 : 2;
    for (size_t s = 0; s < signals.size(); ++s)
      for (int64_t i = 0; i < signals[s].samples; ++i) {
        const auto v = static_cast<uint32_t>(value(static_cast<int>(s), record * signals[s].samples + i));
        for (int b = 0; b < bytes; ++b) out += static_cast<char>(v >> (8 * b));
      }
    if (!annotations.empty()) {
      std::string text = annotations[record % annotations.size()];
      text.resize(40 * bytes, '\0');
      out += text;
    }
    return out;
  }
  std::string Bytes() const {
    std::string out = Header();
    for (int64_t r = 0; r < records; ++r) out += Record(r);
    return out;
  }
};

}  // namespace hierad
