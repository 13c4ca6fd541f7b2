// The recordings of a path, and which of them are kept out of training.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"

namespace hierad {

struct RecordingFiles {
  std::vector<std::string> paths;      // in the order of their bytes
  // Files that hold annotations only, in a folder, by the recording in the same folder that they belong to: that begins at the
  // same time and whose name begins most alike. They are no subjects.
  std::map<std::string, std::vector<std::string>> annotations;
  std::vector<std::string> lone_annotations;   // those that belong to none; all of them where there are no recordings
  int64_t other_files = 0;             // left alone
  int64_t subjects = 0, held_out = 0;  // of all; of those how many are held out
};

// `path`: an .edf or .bdf file, or a folder with such files in it or in folders below. Two recordings that an annotation file
// fits equally well: USER_ERROR that names them. Subjects (each file, or with
// `by_folder` all files of a folder) are held out by a hash of their names, which no other subject and no run changes much:
// the `held_out` fraction of them with the least hashes, at least one and not all.
absl::StatusOr<RecordingFiles> FindRecordings(const std::string& path, double held_out, bool by_folder, Subset subset);

}  // namespace hierad
