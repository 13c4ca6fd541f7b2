#include "worker/probe/probe_samples.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/data/loader.h"

namespace hierad {

absl::StatusOr<ProbeSamples> ReadProbeSamples(const v1::JobSpec& spec, const std::string& path, const Geometry& geometry,
                                              ChannelStatistics* statistics, int threads, std::set<std::string>* seen) {
  ASSIGN_OR_RETURN(std::shared_ptr<const Dataset> dataset, OpenDataset(spec.data(), path, geometry, statistics));
  if (dataset->num_classes() == 0)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(Printable(path), " has no class labels; a probe needs them"));
  Loader::Options options;
  options.spec = spec;
  options.threads = threads;
  options.one_pass = true;
  ASSIGN_OR_RETURN(const std::unique_ptr<Loader> loader, MakeLoader(dataset, options));
  ProbeSamples samples;
  samples.size = geometry.spec.in_chans();
  for (int64_t axis : geometry.input_size) samples.size *= axis;
  for (int64_t k = 0; k < dataset->num_classes(); ++k) samples.class_names.push_back(dataset->class_name(k));
  const RowFormat& format = dataset->row_format();
  std::vector<float> x(samples.size);
  for (;;) {
    const absl::StatusOr<MicroBatch> batch = loader->Next();
    if (absl::IsOutOfRange(batch.status())) break;
    RETURN_IF_ERROR(batch.status());
    for (int b = 0; b < batch->real; ++b) {
      if (batch->labels_B[b] < 0) continue;
      if (!ConvertRow(format, static_cast<const std::byte*>(batch->x_BCS) + b * format.row_bytes(), Visit{}, /*draws=*/false, x.data())) {
        return dataset->NotFinite(batch->visit_ids_B[b]);
      }
      if (!seen->insert(Sha256Hex({reinterpret_cast<const char*>(x.data()), samples.size * sizeof(float)})).second) {
        ++samples.copies;
        continue;
      }
      samples.x_NCS.insert(samples.x_NCS.end(), x.begin(), x.end());
      samples.labels_N.push_back(static_cast<int32_t>(batch->labels_B[b]));
      samples.indices_N.push_back(static_cast<int64_t>(batch->visit_ids_B[b]));
    }
  }
  if (samples.count() == 0) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(Printable(path), " has no labelled samples (", samples.copies, " copies left out)"));
  return samples;
}

absl::Status MatchClasses(const ProbeSamples& train, ProbeSamples* test) {
  for (int32_t& label : test->labels_N) {
    const std::string& name = test->class_names[label];
    const auto at = std::find(train.class_names.begin(), train.class_names.end(), name);
    if (at == train.class_names.end())
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("class '", Printable(name, 60), "' of TEST is not a class of TRAIN"));
    label = static_cast<int32_t>(at - train.class_names.begin());
  }
  test->class_names = train.class_names;
  return absl::OkStatus();
}

absl::StatusOr<LabelledRows> EncoderRows(const ProbeSamples& samples, int64_t batch, int32_t num_classes, Step* step) {
  LabelledRows rows{samples.count(), 0, {}, samples.labels_N, num_classes};
  std::vector<float> x_BCS(batch * samples.size);
  std::vector<int64_t> labels_B(batch, -1);
  std::vector<uint64_t> ids_B(batch);
  for (int64_t begin = 0; begin < samples.count(); begin += batch) {
    const int64_t real = std::min(batch, samples.count() - begin);
    std::fill(x_BCS.begin(), x_BCS.end(), 0.0f);
    std::copy_n(samples.x_NCS.begin() + begin * samples.size, real * samples.size, x_BCS.begin());
    for (int64_t b = 0; b < batch; ++b) ids_B[b] = static_cast<uint64_t>(begin + b);
    const MicroBatch micro{x_BCS.data(), labels_B.data(), ids_B.data(), static_cast<int32_t>(real), 0};
    ASSIGN_OR_RETURN(const std::vector<float> features, step->Features(micro));
    if (features.empty() || features.size() % real != 0)
      return absl::InternalError(absl::StrCat(features.size(), " feature values for ", real, " samples"));
    rows.width = features.size() / real;
    rows.x_NF.insert(rows.x_NF.end(), features.begin(), features.end());
  }
  return rows;
}

LabelledRows RawRows(const ProbeSamples& samples, const Geometry& geometry, int32_t num_classes) {
  const int64_t channels = geometry.spec.in_chans();
  // The input as [frames, height, width], cut into parts_h x parts_w; a series is one row of 16 parts.
  const std::vector<int64_t>& axes = geometry.input_size;
  const int64_t width = axes.back(), height = axes.size() > 1 ? axes[axes.size() - 2] : 1, frames = axes.size() > 2 ? axes[0] : 1;
  const int64_t parts_w = std::min<int64_t>(axes.size() > 1 ? 4 : 16, width), parts_h = axes.size() > 1 ? std::min<int64_t>(4, height) : 1;
  LabelledRows rows{samples.count(), channels * parts_h * parts_w, {}, samples.labels_N, num_classes};
  for (int64_t n = 0; n < samples.count(); ++n) {
    for (int64_t c = 0; c < channels; ++c) {
      const float* x = samples.x_NCS.data() + n * samples.size + c * frames * height * width;
      for (int64_t ph = 0; ph < parts_h; ++ph) {
        for (int64_t pw = 0; pw < parts_w; ++pw) {
          double sum = 0;
          int64_t values = 0;
          for (int64_t f = 0; f < frames; ++f)
            for (int64_t h = ph * height / parts_h; h < (ph + 1) * height / parts_h; ++h)
              for (int64_t w = pw * width / parts_w; w < (pw + 1) * width / parts_w; ++w, ++values) sum += x[(f * height + h) * width + w];
          rows.x_NF.push_back(sum / values);
        }
      }
    }
  }
  return rows;
}

}  // namespace hierad
