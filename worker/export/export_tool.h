// hiera-worker export SOURCE [--to safetensors|timm] [--out FILE] [--output text|json]: writes the file and prints how to
// load it. worker/main calls this with argv[0] = "export" and returns what it returns: 0, or 1 after one sentence on stderr.
#pragma once

namespace hierad {

int ExportMain(int argc, char** argv);

}  // namespace hierad
