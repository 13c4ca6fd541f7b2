#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/job_validate.h"
#include "base/limits.h"
#include "base/random.h"
#include "base/status.h"
#include "worker/data/loader.h"

namespace hierad {

absl::StatusOr<RunLength> RunLength::For(const v1::JobSpec& spec, int64_t dataset_count) {
  RunLength length{};
  const int64_t repeat = std::max(1, spec.data().repeat());
  if (dataset_count < 1) return ErrorOf(v1::REASON_DATA_ERROR, "the data set holds 0 samples; at least 1 is needed");
  if (__builtin_mul_overflow(dataset_count, repeat, &length.visits_per_epoch) || length.visits_per_epoch > limits::kVisitsPerEpoch)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(dataset_count, " samples with data.repeat ", repeat, " are more than ", limits::kVisitsPerEpoch, " visits an epoch: use fewer, and more epochs"));
  length.effective_batch = EffectiveBatch(spec);
  if (length.effective_batch < 1) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("the effective batch is ", length.effective_batch));
  const bool drop = spec.data().last_batch() == "drop";
  length.steps_per_epoch = (length.visits_per_epoch + (drop ? 0 : length.effective_batch - 1)) / length.effective_batch;
  if (length.steps_per_epoch == 0)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.last_batch drop leaves no step: ", length.visits_per_epoch, " visits an epoch (", dataset_count, " samples, repeat ", repeat, "), effective batch ", length.effective_batch));
  if (spec.schedule().has_steps()) {
    length.total_steps = spec.schedule().steps();
  } else if (__builtin_mul_overflow(spec.schedule().epochs(), length.steps_per_epoch, &length.total_steps)) {
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("schedule.epochs ", spec.schedule().epochs(), " of ", length.steps_per_epoch, " steps is beyond 64 bits"));
  }
  if (length.total_steps < 1) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("the run has ", length.total_steps, " steps; set schedule.epochs or schedule.steps to at least 1"));
  return length;
}

int64_t RunLength::RealSamples(int64_t step) const {
  const int64_t begin = (step % steps_per_epoch) * effective_batch;
  return std::min(effective_batch, visits_per_epoch - begin);
}

std::vector<uint64_t> EpochOrder(uint64_t seed, uint32_t epoch, int64_t visits) {
  std::vector<uint64_t> order(visits);
  std::iota(order.begin(), order.end(), uint64_t{0});
  for (int64_t i = visits - 1; i > 0; --i) {
    const Random4 draw = RandomStream{seed, Draw::kOrder, epoch, static_cast<uint64_t>(i)}.At(0);
    const uint64_t word = uint64_t{draw.v[0]} << 32 | draw.v[1];
    std::swap(order[i], order[static_cast<uint64_t>((static_cast<unsigned __int128>(word) * static_cast<uint64_t>(i + 1)) >> 64)]);
  }
  return order;
}

}  // namespace hierad
