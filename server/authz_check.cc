// Run by the build: fails it when an RPC of proto/ has no rule. Arguments: the .proto files.
#include <cstdio>

#include "hierad/v1/agent.pb.h"
#include "hierad/v1/control.pb.h"
#include "hierad/v1/worker.pb.h"
#include "server/authz.h"

int main(int argc, char** argv) {
  // Descriptors are there once their file is linked.
  (void)hierad::v1::AgentReport::descriptor();
  (void)hierad::v1::SubmitRequest::descriptor();
  (void)hierad::v1::WorkerReport::descriptor();
  const auto errors = hierad::TableErrors({argv + 1, argv + argc});
  for (const std::string& error : errors) std::fprintf(stderr, "error: %s\n", error.c_str());
  return errors.empty() ? 0 : 1;
}
