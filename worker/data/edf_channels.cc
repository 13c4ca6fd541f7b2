#include "worker/data/edf_channels.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

std::string Labels(const EdfHeader& header) {
  std::string labels;
  for (const EdfSignal& signal : header.signals)
    if (!signal.annotations) absl::StrAppend(&labels, labels.empty() ? "" : ", ", Printable(signal.label, 40));
  return Printable(labels, 600);
}

std::string Lower(const std::string& text) {
  std::string lower = text;
  for (char& c : lower) c = absl::ascii_tolower(c);
  return lower;
}

// -1: none; -2: several, the first two in `both`.
int Match(const EdfHeader& header, const std::string& wanted, bool plain, std::string* both) {
  int found = -1;
  for (size_t i = 0; i < header.signals.size(); ++i) {
    const EdfSignal& signal = header.signals[i];
    if (signal.annotations || (plain ? PlainChannelName(signal.label) : Lower(signal.label)) != wanted) continue;
    if (found >= 0) {
      *both = absl::StrCat("'", Printable(header.signals[found].label, 40), "' (signal ", found, ") and '", Printable(signal.label, 40), "' (signal ", i, ")");
      return -2;
    }
    found = static_cast<int>(i);
  }
  return found;
}

}  // namespace

std::string PlainChannelName(const std::string& label) {
  static constexpr const char* kKinds[] = {"eeg ", "eog ", "emg ", "ecg ", "ekg ", "seeg ", "ecog ", "meg ", "misc "};
  static constexpr const char* kReferences[] = {"ref", "le", "ar", "avg", "av", "car", "org", "linked", "lm"};
  std::string name = Lower(label);
  for (const std::string kind : kKinds)
    if (name.compare(0, kind.size(), kind) == 0) {
      name.erase(0, kind.size());
      break;
    }
  while (!name.empty() && (name.back() == '.' || name.back() == ' ')) name.pop_back();
  if (const size_t dash = name.rfind('-'); dash != std::string::npos && dash > 0) {
    const std::string reference = name.substr(dash + 1);
    if (std::find(std::begin(kReferences), std::end(kReferences), reference) != std::end(kReferences)) name.erase(dash);
  }
  while (!name.empty() && name.back() == ' ') name.pop_back();
  return name;
}

absl::StatusOr<int> FindChannel(const EdfHeader& header, const std::string& wanted, const std::string& file) {
  for (const std::string& alternative : Split(wanted, '|')) {
    for (const bool plain : {false, true}) {
      std::string both;
      const int found = Match(header, plain ? PlainChannelName(alternative) : Lower(alternative), plain, &both);
      if (found >= 0) return found;
      if (found == -2)
        return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file, ": channel '", Printable(alternative, 60), "' of data.channels may be ", both, "; write the whole label"));
    }
  }
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file, ": no channel '", Printable(wanted, 60), "' of data.channels; there are ", Labels(header), " (alternatives are written as 'T7|T3')"));
}

std::optional<double> VoltsOf(const std::string& unit) {
  std::string name = Lower(unit);
  if (name == "v" || name == "volt" || name == "volts") return 1;
  if (name == "mv" || name == "millivolt") return 1e-3;
  if (name == "nv" || name == "nanovolt") return 1e-9;
  // Micro: the sign of Latin-1, the Greek letter, u, or the word.
  for (const std::string micro : {"u", "\xC2\xB5", "\xCE\xBC", "micro"})
    for (const std::string volt : {"v", "volt"})
      if (name == micro + volt) return 1e-6;
  return std::nullopt;
}

}  // namespace hierad
