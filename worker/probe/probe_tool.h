// hiera-worker probe --run FOLDER [--train PATH] [--test PATH] [--group-size N] [--device cpu|cuda] [--threads N] [-o table|json]
// Prints the table (or the JSON) and writes it to FOLDER/probe.json. worker/main calls this with argv[0] = "probe" and
// returns what it returns: 0, or 1 after one sentence on stderr.
#pragma once

namespace hierad {

int ProbeMain(int argc, char** argv);

}  // namespace hierad
