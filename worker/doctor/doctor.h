// What only the engine can see for `hierctl doctor`: the cards, the versions of CUDA and NCCL that this build brings, how
// fast a job's data is read and how long its step takes here. Figures only; hierctl judges them.
#pragma once

#include <string>

#include "hierad/v1/job.pb.h"

namespace hierad {

// One JSON object, whatever fails:
//   gpus          library problem driver cuda silent[] cards[]: index uuid name memory_bytes free_bytes sm_mhz most_sm_mhz
//                 temperature_c slowed ecc uncorrected_errors (null: not told)
//   cuda_runtime  13000 is 13.0; 0: built without CUDA      nccl  22809 is 2.28.9; 0: none
//   data, step    with a job: {samples samples_per_s threads}, {ms peak_bytes what}, or {problem}; step may be {skipped}: why
// `job` null: no job. It has its defaults filled in and is legal.
std::string DoctorFigures(const v1::JobSpec* job, const std::string& nvml);

// Of this build; 0: not in it.
struct LibraryVersions {
  int cuda_runtime = 0, nccl = 0;
};
LibraryVersions BuiltWith();

}  // namespace hierad
