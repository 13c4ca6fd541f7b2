// Finding channels by the names people use, and their units.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/edf_header.h"

namespace hierad {

// "EEG Fp1-Ref", "Fp1.", "FP1-LE" -> "fp1": the kind in front and a common reference behind are dropped. A derivation between
// two electrodes ("Fp1-F7") stays as it is.
std::string PlainChannelName(const std::string& label);

// Index of the signal meant by `wanted`, alternatives of which are parted by '|': the first that is there, by its label,
// else by its plain name. Not there, or two that could be meant: DATA_ERROR with the labels there are.
absl::StatusOr<int> FindChannel(const EdfHeader& header, const std::string& wanted, const std::string& file);

// Volts of a unit: "uV" 1e-6; nothing for what is no voltage.
std::optional<double> VoltsOf(const std::string& unit);

}  // namespace hierad
