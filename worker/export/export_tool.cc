#include "worker/export/export_tool.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "worker/export/export.h"

namespace hierad {

int ExportMain(int argc, char** argv) {
  CLI::App app("Writes a run's weights as one safetensors file for PyTorch", "hiera-worker export");
  ExportOptions options;
  std::string output = "text";
  app.add_option("source", options.source, "A run's folder (its newest checkpoint), or one checkpoint's folder")->required()->type_name("RUN_FOLDER|CHECKPOINT");
  app.add_option("--to", options.to, "safetensors: FAIR's names; timm: timm's names")->check(CLI::IsMember({"safetensors", "timm"}))->capture_default_str();
  app.add_option("-o,--out", options.out, "File to write; default: in the run's exported/")->type_name("FILE");
  app.add_option("--output", output, "text or json")->check(CLI::IsMember({"text", "json"}))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 1;
  }
  const absl::StatusOr<ExportReport> report = Export(options);
  if (!report.ok()) {
    std::fprintf(stderr, "hiera-worker export: %s\n", std::string(report.status().message()).c_str());
    return 1;
  }
  std::fputs((output == "json" ? report->Json() : report->Text()).c_str(), stdout);
  return 0;
}

}  // namespace hierad
