// Preparation of signals, in this order: missing values, mean of every N points, clipping, cropping, normalisation or
// scaling, padding at the end; in training then a shift in time, dropped channels and a factor, each drawn by the visit alone.
// Here a row is cropped and padded, in the type of its file; the rest is the step's (RowFormat). Means, windows' own statistics and
// mended values are made here, in fp32 rows.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "hierad/v1/job.pb.h"
#include "worker/data/dataset.h"
#include "worker/data/signal_source.h"

namespace hierad {

// A time series for a 2-D or 3-D model is reshaped row-major after preparation. With normalize channel and empty
// `statistics`, one pass over the data computes them.
absl::StatusOr<std::unique_ptr<Dataset>> MakeSignalDataset(std::unique_ptr<SignalSource> source, const v1::DataSpec& data,
                                                           const std::string& path, const Geometry& geometry,
                                                           ChannelStatistics* statistics);

}  // namespace hierad
