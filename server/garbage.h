// What ended jobs have left on disk and may go: found, measured, removed. Stateless; for a thread that may wait for disks.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "base/account.h"
#include "base/fs.h"
#include "hierad/v1/control.pb.h"

namespace hierad {

// The folder of an ended job that may go, with its size; none: there is nothing (any more). `whole_run`: the run folder
// itself, where hierad has named it: a folder that the user named may hold other things, so there it is the checkpoints.
// The path is the submitter's word, who may not do what hierad may: where by now a link stands on it, that is its `problem`.
// `account`: whose rights to files looking and removing have; none: this process's own.
bool GarbageOf(const v1::Job& job, bool whole_run, const std::optional<Account>& account, v1::Garbage* garbage);

// `problem` says why it was not.
void RemoveGarbage(const std::optional<Account>& account, v1::Garbage* garbage);

// Whether the user gave the folder: it may be anybody's, so that only the rights of the job's account say what may go there.
inline bool FolderIsGiven(const v1::Job& job) { return !job.spec().output().folder().empty(); }

// Bytes of the files below a folder; links are not followed.
int64_t FolderBytes(const UniqueFd& folder);

}  // namespace hierad
