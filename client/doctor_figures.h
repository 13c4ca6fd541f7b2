// What `hierctl doctor` sees of this machine.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "client/doctor_checks.h"

namespace hierad {

// Limits, /dev/shm, memory, environment; writes and removes one file in the nearest folder above `folder` that is there, to
// time the disk.
void ReadMachine(const std::string& folder, DoctorFigures* figures);
// Runs hiera-worker doctor, with a job for some seconds. What fails is said in worker_problem.
void AskWorker(const v1::JobSpec* job, DoctorFigures* figures);
// What it prints; InvalidArgument: something else.
absl::Status ParseWorkerFigures(const std::string& json, DoctorFigures* figures);

}  // namespace hierad
