// What ended jobs have left on disk and may go: found, measured, removed. Stateless; for a thread that may wait for disks.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/fs.h"
#include "hierad/v1/control.pb.h"

namespace hierad {

// The folder of an ended job that may go, with its size; none: there is nothing (any more). `whole_run`: the run folder
// itself, where hierad has named it: a folder that the user named may hold other things, so there it is the checkpoints.
// The path is the submitter's word, who may not do what hierad may: where by now a link stands on it, that is its `problem`.
bool GarbageOf(const v1::Job& job, bool whole_run, v1::Garbage* garbage);

// `problem` says why it was not.
void RemoveGarbage(v1::Garbage* garbage);

// Bytes of the files below a folder; links are not followed.
int64_t FolderBytes(const UniqueFd& folder);

}  // namespace hierad
