// hiera-worker doctor [JOB.yaml]: prints DoctorFigures. worker/main calls this with argv[0] = "doctor" and returns what it
// returns: 0, or 1 after one sentence on stderr.
#pragma once

namespace hierad {

int DoctorMain(int argc, char** argv);

}  // namespace hierad
