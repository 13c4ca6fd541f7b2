// A set of samples on disk, behind one small interface; a reader per format. Thread-safe after opening.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "base/plan/row_format.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

// Which version of a sample is read: augmentation draws are functions of (seed, epoch, visit) and nothing else.
struct Visit {
  uint64_t sample = 0;     // index in the dataset
  uint64_t id = 0;         // sample + repetition * count: the key of the draws of this visit
  uint64_t seed = 0;
  uint32_t epoch = 0;
  bool augment = true;     // false: the deterministic form (evaluation, probe): centre crop, no flip
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t count() const = 0;
  virtual int64_t num_classes() const = 0;                 // 0: no labels
  virtual std::string class_name(int64_t label) const = 0;
  virtual int64_t label(uint64_t sample) const = 0;        // -1: none
  // What a row is, and what the step makes of it. The default, for tests: fp32, as it is.
  virtual const RowFormat& row_format() const;
  // Writes one sample as its row, [in_chans, input_size...] of the format's type: cropped and padded, not yet scaled. Unreadable
  // files are REASON_DATA_ERROR naming the file and the sample; values that are not finite too where data.on_error is skip, else
  // the step finds them.
  virtual absl::Status ReadRow(const Visit& visit, void* row) const = 0;
  // REASON_DATA_ERROR that says where in the sample the value is that a step found not to be finite.
  virtual absl::Status NotFinite(uint64_t sample) const;
  // The row as the model sees it: [in_chans, input_size...] fp32, all that is drawn for the visit applied where it augments.
  absl::Status Read(const Visit& visit, float* x_CS) const;
  virtual std::string Describe() const = 0;                // one line for the log
  virtual std::string SampleName(uint64_t sample) const = 0;   // "file, sample 7", printable: for messages
  virtual int64_t bytes_read() const { return 0; }             // from files, so far
  // Where the time of the reads so far went: (stage, seconds of all threads), always the same stages.
  virtual std::vector<std::pair<std::string, double>> stages() const { return {}; }
};

// A row as the model sees it; `draws`: with what is drawn for the visit. False: a value is not finite.
bool ConvertRow(const RowFormat& format, const void* row, const Visit& visit, bool draws, float* x_CS);

// The same samples in rows that only the draws are left to do with: fp32, clipped and scaled. For sets that one step shall take
// though their own rows differ.
std::unique_ptr<Dataset> PreparedRows(std::shared_ptr<const Dataset> dataset);

// Statistics that belong to the training set and are applied to others (evaluation, probe's TEST).
struct ChannelStatistics {
  std::vector<double> mean, std;   // per channel; empty: not used by this source
};

// Which subjects of a set are meant, where data.held_out keeps some out of training.
enum class Subset { kAll, kTraining, kHeldOut };

// Opens `path` as `data` says, for a model of geometry `geometry`. `statistics`: in, those of the training set when not
// empty; out (empty in), those computed here. A channel count or length that does not match is REASON_USER_ERROR with
// both numbers; a damaged file REASON_DATA_ERROR with file and line or offset.
absl::StatusOr<std::unique_ptr<Dataset>> OpenDataset(const v1::DataSpec& data, const std::string& path,
                                                     const Geometry& geometry, ChannelStatistics* statistics,
                                                     Subset subset = Subset::kAll);

}  // namespace hierad
