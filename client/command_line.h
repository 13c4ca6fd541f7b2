// hierctl's command line.
#pragma once

#include "client/context.h"

namespace hierad {

// Parses `argv` (argv[0]: the program), runs the command; the exit code. `context`'s json and server are set from it.
int RunCommandLine(int argc, const char* const* argv, Context context);

}  // namespace hierad
