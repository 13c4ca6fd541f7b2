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
  int64_t row_bytes() const { return rules.synthetic > 0 ? 0 : rules.channels * rules.samples * SizeOf(type); }

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

// A job's rows as far as the job alone tells them: the widest that its data may have.
inline RowFormat WidestRows(const v1::DataSpec& data, const Geometry& geometry) {
  RowFormat format = RowFormat::Plain(geometry);
  if (data.source() == "images") format.type = DType::kI16;
  if (data.source() == "synthetic") format.rules.synthetic = data.synthetic_samples() > 0 ? data.synthetic_samples() : 1;
  return format;
}

inline const char* RowTypeName(DType rows) {
  switch (rows) {
    case DType::kU8: return "u8";
    case DType::kI16: return "i16";
    case DType::kF16: return "f16";
    default: return "f32";
  }
}

inline const char* RowsName(const RowFormat& rows) { return rows.rules.synthetic > 0 ? "synthetic" : RowTypeName(rows.type); }

}  // namespace hierad
