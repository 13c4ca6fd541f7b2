// What the rows of a data set hold, and what the step makes of them.
#pragma once

#include <vector>

#include "base/plan/geometry.h"
#include "base/plan/rows.h"

namespace hierad {

struct RowFormat {
  DType type = DType::kF32;           // kU8, kI16, kF16 or kF32
  std::vector<float> offset, scale;   // per channel: (value - offset) * scale
  RowRules rules;

  bool operator==(const RowFormat&) const = default;
  int64_t row_bytes() const { return rules.channels * rules.samples * SizeOf(type); }

  // Values of a model's input as they are.
  static RowFormat Plain(const Geometry& geometry) {
    RowFormat format;
    format.rules.channels = geometry.spec.in_chans();
    format.rules.samples = 1;
    for (const int64_t extent : geometry.input_size) format.rules.samples *= extent;
    format.rules.points = format.rules.samples;
    format.rules.width = geometry.input_size.back();
    format.offset.assign(size_t(format.rules.channels), 0.0f);
    format.scale.assign(size_t(format.rules.channels), 1.0f);
    return format;
  }
  // `asked`, or plain values where nothing was asked for (no samples).
  static RowFormat Or(const RowFormat& asked, const Geometry& geometry) { return asked.rules.samples > 0 ? asked : Plain(geometry); }
};

// The type of a job's rows as far as the job alone tells it: the widest that its data may have.
inline DType WidestRows(const v1::DataSpec& data) { return data.source() == "images" ? DType::kI16 : DType::kF32; }

inline const char* RowTypeName(DType rows) {
  switch (rows) {
    case DType::kU8: return "u8";
    case DType::kI16: return "i16";
    case DType::kF16: return "f16";
    default: return "f32";
  }
}

}  // namespace hierad
