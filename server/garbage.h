// What ended jobs have left on disk and may go: found, measured, removed. Stateless; for a thread that may wait for disks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hierad/v1/control.pb.h"

namespace hierad {

// The folder of an ended job that may go, with its size; none: there is nothing (any more). `whole_run`: the run folder
// itself, where hierad has named it: a folder that the user named may hold other things, so there it is the checkpoints.
bool GarbageOf(const v1::Job& job, bool whole_run, v1::Garbage* garbage);

// Bytes of the files below a folder; links are not followed.
int64_t FolderBytes(const std::string& folder);

}  // namespace hierad
